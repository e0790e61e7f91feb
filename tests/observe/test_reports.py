"""A rank writes a report when its communicator fails or a signal requests a report, and continues undisturbed."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from proxyccl import Communicator, ProxyCCLError, Trigger, WaitTimeoutError
from proxyccl.__main__ import main
from proxyccl.channels.liveness.watcher import WatchThread
from proxyccl.channels.reports import collect
from proxyccl.channels.reports.find import find
from proxyccl.channels.reports.render import render
from proxyccl.channels.reports.report import Report
from proxyccl.device.host import HostRuntime
from proxyccl.proxy.reports import files
from proxyccl.proxy.reports.document import ReportError
from proxyccl.proxy.ring import Fifo
from proxyccl.proxy.trigger import Operation
from support.bare_loops import produce
from support.device_arrays import on_device
from support.devices import processes
from support.hanging import KERNELS, caught, hang
from support.paths import PROGRAMS
from support.processes import run_processes
from support.running import SHORT, impatient, run_mpi, run_ranks

PROGRAM = PROGRAMS / "hangs.py"
PROCESSES = processes(3)
VICTIM = 1


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "reports"
    monkeypatch.setenv("PROXYCCL_REPORT_DIR", str(directory))
    return directory


def written(directory: Path) -> dict[int, Report]:
    """Returns the reports in a directory, by rank; all must be about one communicator."""
    found = find([directory])
    assert not found.problems
    assert len({report.communicator for report in found.ranks}) == 1
    return {report.rank: report for report in found.ranks}


# -- contents of reports ---


def test_every_rank_reports_a_time_out_and_its_wait(reports: Path) -> None:
    errors = run_ranks(2, hang)
    found = written(reports)
    assert set(found) == {0, 1}
    assert reports.stat().st_mode & 0o077 == 0
    for rank, report in found.items():
        error = errors[rank]
        assert isinstance(error, WaitTimeoutError)
        assert report.failure is not None
        assert (report.failure.kind, report.failure.message) == ("WaitTimeoutError", str(error))
        (note,) = error.__notes__
        assert str(reports / f"{report.communicator}-rank{rank}-{os.getpid()}-1.json") in note
        assert [member.pid for member in report.members] == [os.getpid()] * 2
        assert report.timeout == SHORT
        assert not report.unread
        assert any(thread.own and "hanging.py" in thread.program for thread in report.threads)
    (wait,) = found[1].waits
    assert (wait.peer, wait.expected, wait.seen) == (0, 3, 2)
    assert "ProxyChannel" in wait.what


def test_a_report_shows_calls_rings_and_channels(reports: Path) -> None:
    run_ranks(2, hang)
    found = written(reports)
    assert found[0].calls[0].fields["collective"] == "all_reduce"
    assert found[0].calls[0].fields["count"] == "7"
    assert found[0].calls[0].number == 1
    (ring,) = found[0].rings
    assert (ring.taken, ring.full) == (2, 0)
    assert [(trigger.ticket, trigger.operation, trigger.size) for trigger in ring.recent] == [
        (0, "data+signal+flush", 64),
        (1, "data+signal+flush", 64),
    ]
    (sent,), (received,) = found[0].channels, found[1].channels
    assert (sent.peer, sent.puts, sent.bytes, sent.signals, sent.flushes) == (1, 2, 128, 2, 2)
    assert (sent.flushed, sent.flush_asked) == (2, 2)
    assert sent.outstanding == 0
    assert (received.signals_in, received.signals_used) == (2, 2)
    assert sent.peer_channel == received.id


def test_a_report_shows_semaphores_in_device_memory(reports: Path) -> None:
    def body(comm: Communicator) -> None:
        channels = comm.sm_channels(comm.empty(16))
        kernels = comm.compile(KERNELS)
        comm.all_reduce(on_device(comm, np.ones(7, np.float32)), algorithm="two_shot")
        comm.synchronize()
        impatient(comm)
        if comm.rank == 0:
            kernels.wait_mapped(1, 1, channels.to(1))
        assert caught(comm.synchronize if comm.rank == 0 else lambda: comm.barrier() or comm.synchronize())

    run_ranks(2, body)
    found = written(reports)
    (wait,) = (wait for wait in found[0].waits if wait.what == "a signal (SmChannel)")
    assert (wait.peer, wait.expected, wait.seen) == (1, 1, 0)
    lanes = [{(item.peer, item.lane): item for item in found[rank].semaphores} for rank in (0, 1)]
    assert lanes[0][1, 0].signals_in == lanes[1][0, 0].signals_out > 0
    assert lanes[1][0, 0].signals_in == lanes[1][0, 0].signals_used == lanes[0][1, 0].signals_out


def test_a_report_reads_as_text(reports: Path) -> None:
    run_ranks(2, hang)
    text = render(written(reports)[1])
    assert "rank 1 of 2" in text
    assert "a signal (ProxyChannel) from rank 0: expected 3, saw 2" in text
    assert "all_reduce #1: dtype float32, op sum" in text
    assert "to rank 0 by copy" in text
    assert "2 signals received, 2 of them waited for" in text
    assert "test_reports.py" in text


def test_text_in_reports_stays_on_its_lines(reports: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, hang)
    for path in reports.iterdir():
        fields = json.loads(path.read_text())
        fields["communicator"] = fields["command"] = "a\ncommunicator fake\x1b[31m\u202e"
        path.write_text(json.dumps(fields))
    capsys.readouterr()
    assert main(["doctor", "--full", str(reports)]) == 0
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.splitlines())
    escaped = r"communicator a\ncommunicator fake\x1b[31m\u202e"
    assert [line for line in out.splitlines() if line.startswith("communicator")] == [
        f"{escaped} of 2 ranks: reports of all 2 ranks"
    ]


def test_a_file_that_is_not_a_report_of_a_moment_is_named(reports: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, hang)
    first, second = sorted(reports.iterdir())
    for written in ("2026-13-40", "2026-11-28", "2026-11-28T10:00:00+05:00", ""):
        first.write_text(json.dumps(json.loads(second.read_text()) | {"written": written}))
        os.mkfifo(reports / "00000000-rank0-1-1.json")
        capsys.readouterr()
        assert main(["doctor", str(reports)]) == 0
        assert f"proxyccl: invalid report from {first}: " in capsys.readouterr().err
        (reports / "00000000-rank0-1-1.json").unlink()


def test_what_can_not_be_read_is_said_and_the_rest_is_there(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr("proxyccl.proxy.ring.Ring.snapshot", refuse)
    errors = run_ranks(2, hang)
    assert all(isinstance(error, WaitTimeoutError) for error in errors)
    for report in written(reports).values():
        assert "the rings: RuntimeError: not today" in report.unread
        assert report.channels
        assert report.calls


# -- when a report is written ---


def test_an_unwritable_directory_only_adds_a_line_on_stderr(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PROXYCCL_REPORT_DIR", str(tmp_path / "file"))
    errors = run_ranks(2, hang)
    assert all(isinstance(error, WaitTimeoutError) for error in errors)
    assert not any(hasattr(error, "__notes__") for error in errors)
    assert capfd.readouterr().err.count("no report could be written") == 2


def test_no_collection_begins_while_threads_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing threads holds a lock, for which a finalizer in a garbage collection could wait forever."""
    collects: list[bool] = []
    own = {threading.get_ident(): sys._getframe()}
    monkeypatch.setattr(sys, "_current_frames", lambda: collects.append(gc.isenabled()) or own)
    assert collect._frames() == {}
    assert (collects, gc.isenabled()) == ([False], True)


def test_a_rank_that_closes_before_its_watcher_has_looked_reports_too(
    reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WatchThread, "INTERVAL_MS", 10_000)
    run_ranks(2, hang)
    assert sorted(written(reports)) == [0, 1]


def test_no_report_of_an_abort_that_the_program_asked_for(reports: Path) -> None:
    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            comm.abort("enough")
        else:
            assert caught(lambda: comm.barrier() or comm.synchronize())

    run_ranks(2, body)
    assert not reports.exists()


def test_reports_can_be_turned_off(reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_REPORTS", "off")
    run_ranks(2, hang)
    assert not reports.exists()
    monkeypatch.setenv("PROXYCCL_REPORTS", "perhaps")
    with pytest.raises(ProxyCCLError, match="PROXYCCL_REPORTS"):
        run_ranks(1, lambda comm: None)


def test_the_default_directory_keeps_the_newest_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROXYCCL_REPORT_DIR", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PROXYCCL_PROXY", "thread")  # if the proxies ran in a daemon, it would write a report too
    monkeypatch.setattr(files, "KEPT", 3)
    (directory := files.directory()).mkdir(parents=True)
    (directory / "of somebody else.json").touch()
    for number in range(5):
        old = directory / f"{number:08x}-rank0-1-1.json"
        old.touch()
        os.utime(old, (number, number))
    run_ranks(2, hang)
    names = sorted(path.name for path in directory.iterdir())
    assert len(names) == 4
    assert "of somebody else.json" in names
    assert f"{4:08x}-rank0-1-1.json" in names


# -- reports that a signal requests ---


def run_hangs(directory: Path, scenario: str) -> tuple[dict[int, Report], list[str]]:
    """Runs a scenario of `PROGRAM`. Returns the reports by rank, and the ranks' outputs."""
    environment = {"PROXYCCL_REPORT_DIR": str(directory)}
    ended = run_processes(PROCESSES, PROGRAM, scenario, env=environment)
    assert all(process.returncode == 0 for process in ended), [process.stderr for process in ended]
    said = [process.stdout.partition(": ")[2].strip() for process in ended]
    return written(directory) if directory.exists() else {}, said


def test_ranks_that_hang_report_on_a_signal_and_go_on(reports: Path) -> None:
    found, said = run_hangs(reports, "signalled_while_it_hangs")
    assert set(found) == set(range(PROCESSES))
    assert said == [f"finished with {float(PROCESSES * PROCESSES)}"] * PROCESSES
    for rank, report in found.items():
        assert report.cause == "signal SIGUSR1"
        assert report.failure is None
        if rank == VICTIM:
            assert not report.waits
            assert len(report.calls) == 1
        else:
            assert [wait.peer for wait in report.waits if wait.peer is not None] == [VICTIM]
            assert len(report.calls) == 2
            assert any("signalled_while_it_hangs" in thread.program for thread in report.threads if thread.own)


def test_an_mpi_that_handles_the_signal_leaves_it_to_us(reports: Path) -> None:
    result = run_mpi(PROCESSES, PROGRAM, "signalled_while_it_hangs", env={"PROXYCCL_REPORT_DIR": str(reports)})
    assert result.returncode == 0, result.stderr
    assert set(written(reports)) == set(range(PROCESSES))
    assert result.stdout.count("finished") == PROCESSES


def test_a_signal_to_healthy_ranks(reports: Path) -> None:
    found, said = run_hangs(reports, "signalled_while_all_is_well")
    assert said == ["wrote 0 more"] * PROCESSES
    assert not any(report.waits or report.failure or report.exchange for report in found.values())


def test_signals_that_the_program_handles_leave_the_reporter_waiting(reports: Path) -> None:
    found, said = run_hangs(reports, "signalled_after_other_signals")
    assert set(found) == set(range(PROCESSES))
    assert said == ["reported"] * PROCESSES


def test_a_program_that_handles_the_signal_itself_keeps_it(reports: Path) -> None:
    found, said = run_hangs(reports, "signal_handled_by_the_program")
    assert not found
    assert said == ["caught True"] * PROCESSES


def test_the_child_of_a_fork_does_not_report(reports: Path) -> None:
    found, said = run_hangs(reports, "forked")
    assert not found
    assert said == [f"ended by {int(signal.SIGUSR1)}"] * PROCESSES


# -- parts of a report ---


@pytest.mark.host_only(reason="the CPU pushes")
def test_a_ring_seen_from_the_side() -> None:
    fifo = Fifo(HostRuntime(), 8)
    assert fifo.snapshot().full == fifo.snapshot().taken == 0

    def push(first: int, count: int, size: int) -> None:
        words = Trigger(Operation.DATA, channel=5, size=size).encode()
        assert produce(fifo, first, words, count, 1.0) == count

    push(0, 6, 100)
    assert [trigger.ticket for trigger in fifo.snapshot().waiting] == list(range(6))
    fifo.tail[0] = 6
    push(6, 5, 200)
    view = fifo.snapshot(3)
    assert (view.size, view.taken, view.full) == (8, 6, 5)
    assert [(trigger.ticket, trigger.size) for trigger in view.waiting] == [(6, 200), (7, 200), (8, 200)]
    assert [(trigger.ticket, trigger.size, trigger.channel) for trigger in view.recent] == [
        (3, 100, 5),
        (4, 100, 5),
        (5, 100, 5),
    ]
    fifo.close()


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Returns a report in which no part is empty."""
    directory = tmp_path_factory.mktemp("sample")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROXYCCL_REPORT_DIR", str(directory))
        run_ranks(2, hang)
    return written(directory)[1]


def test_a_report_is_read_back_as_it_was_written(sample: Report, tmp_path: Path) -> None:
    (file := tmp_path / "report").write_text(sample.encode())
    assert find([file]).ranks == [sample]


def damaged(sample: Report, **changes: Any) -> str:
    return json.dumps({**json.loads(sample.encode()), **changes})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (lambda _: "", "expected JSON, got b''"),
        (lambda _: "[" * 100_000, "expected JSON"),
        (lambda _: "\0\xff", "expected JSON"),
        (lambda _: "{}", "field 'format' is missing"),
        (lambda _: "[1]", r"expected object, got \[1\]"),
        (lambda sample: sample.encode()[:-100], "expected JSON"),
        (lambda sample: damaged(sample, version=99), "version: unknown value 99; expected 6"),
        (lambda sample: damaged(sample, rank="1"), "rank: expected int, got '1'"),
        (lambda sample: damaged(sample, rank=7), "rank: expected less than 2, the number of members, got 7"),
        (lambda sample: damaged(sample, members=[{"host": "a"}] * 2), r"members\[0\]: field 'pid' is missing"),
        (
            lambda sample: damaged(sample, waits=[{**structs.asdict(sample.waits[0]), "peer": 9}]),
            "peer: expected less than 2, the number of members, got 9",
        ),
        (lambda sample: damaged(sample, calls={}), "calls: expected array, got {}"),
        (
            lambda sample: json.dumps({"format": "proxyccl report", "version": sample.version}),
            "field 'communicator' is missing",
        ),
    ],
)
def test_nonsense_is_refused_and_the_file_named(
    sample: Report, tmp_path: Path, text: Callable[[Report], str], reason: str
) -> None:
    (file := tmp_path / "nonsense.json").write_text(text(sample), encoding="latin-1")
    with pytest.raises(ReportError, match=rf"nonsense\.json.*{reason}"):
        find([file])


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="No such file"):
        find([tmp_path / "nowhere"])


def test_a_directorys_reports_come_with_what_is_wrong(sample: Report, tmp_path: Path) -> None:
    files_of = {"01234567-rank0-1-1.json": sample.encode(), "01234567-rank1-1-1.json": "{", "notes.txt": "{"}
    for name, text in files_of.items():
        (tmp_path / name).write_text(text)
    found = find([tmp_path])
    assert found.ranks == [sample]
    (problem,) = found.problems
    assert "rank1" in problem
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReportError, match="no reports"):
        find([tmp_path / "empty"])
