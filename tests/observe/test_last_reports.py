"""A rank that fails and exits waits for the others' reports first, because its exit may end the whole job."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from proxyccl.channels.reports import peers
from proxyccl.channels.reports.diagnosis import diagnose
from proxyccl.channels.reports.find import find
from proxyccl.device.process.namespaces import proc_view
from proxyccl.proxy.hosts import host_name
from proxyccl.proxy.processes import is_stopped, start_of
from proxyccl.proxy.reports import files
from proxyccl.proxy.reports.document import Member
from support.devices import processes
from support.paths import PROGRAMS
from support.running import run_mpi, wait_for


def test_ranks_that_sleep_report_before_the_job_is_ended(tmp_path: Path) -> None:
    size = processes(3)
    result = run_mpi(size, PROGRAMS / "absent.py", env={"PROXYCCL_REPORT_DIR": str(tmp_path)})
    assert "WaitTimeoutError" in result.stderr
    reports = find([tmp_path]).ranks
    ranks = {
        report.communicator: sorted({each.rank for each in reports if each.communicator == report.communicator})
        for report in reports
    }
    assert sorted(ranks.values()) == [[0, 1], list(range(size))], "of the part that failed, and of all"
    (diagnosis,) = diagnose(reports)
    (finding,) = diagnosis.findings
    assert any("absent.py" in reason and reason.endswith("in sleeps") for reason in finding.reasons), finding


def test_a_report_is_awaited_while_its_process_may_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_REPORT_DIR", str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        member = Member(host_name(), process.pid, start_of(process.pid), proc_view())

        def is_due(rank: int, seconds: float = 60) -> bool:
            return peers._Awaited("0123abcd", rank, member, time.monotonic() + seconds).is_due()

        assert is_due(1)
        assert not is_due(1, -1), "the time is over"
        process.send_signal(signal.SIGSTOP)
        wait_for(lambda: is_stopped(process.pid), "it is stopped")
        assert not is_due(1), "it is stopped"
        process.send_signal(signal.SIGCONT)
        wait_for(lambda: not is_stopped(process.pid), "it goes on")
        files.write("0123abcd", "rank1", 1, "{}")
        assert not is_due(1), "it is written"
        assert is_due(10)
    finally:
        process.kill()
        process.wait()
    assert not is_due(10), "it has ended"
