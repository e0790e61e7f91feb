"""`proxyccl doctor` concludes, from reports of real hangs, which rank waits for which rank, and why."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from proxyccl import Communicator, ProxyCCLError, ThreadBootstrap
from proxyccl.channels.reports.diagnosis import Diagnosis, Finding, diagnose
from proxyccl.channels.reports.find import find
from proxyccl.channels.reports.render import with_arguments
from proxyccl.channels.reports.report import Call, Failure, Report
from proxyccl.proxy.processes import start_of
from proxyccl.proxy.reports.document import Member
from support.device_arrays import on_device
from support.devices import processes, require_devices
from support.paths import PROGRAMS
from support.processes import run_processes
from support.ranks import Gate
from support.running import impatient, run_ranks

PROGRAM = PROGRAMS / "hangs.py"
PROCESSES = processes(3)
VICTIM = 1
KERNELS = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void send(DeviceHandle<ProxyChannel> channel) { channel.putWithSignal(0, 0, 64); }
extern "C" __global__ void wait(DeviceHandle<ProxyChannel> channel) { channel.wait(); }
extern "C" __global__ void call_handler(ProxyChannelDeviceHandle channel) { channel.custom(1, 2); }
extern "C" __global__ void flush_handler(ProxyChannelDeviceHandle channel) { channel.flush(); }
"""


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PROXYCCL_REPORT_DIR", str(tmp_path))
    return tmp_path


def wait_out(action: Callable[[], object]) -> None:
    """Runs an action that hangs until it raises one of the library's exceptions."""
    with pytest.raises(ProxyCCLError):
        action()


def told(directory: Path) -> Diagnosis:
    """Returns the diagnosis of the one job whose reports are in a directory."""
    (diagnosis,) = diagnose(find([directory]).ranks)
    return diagnosis


def found(diagnosis: Diagnosis, kind: str) -> Finding:
    (finding,) = (finding for finding in diagnosis.findings if finding.kind == kind)
    return finding


def await_reports(directory: Path, ranks: int) -> None:
    """Waits until every rank has reported, because a report shows what the rank is doing at that time."""
    deadline = time.monotonic() + 60
    while len(list(directory.glob("*.json"))) < ranks:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ones(comm: Communicator, count: int = 100) -> Any:
    return on_device(comm, np.ones(count, np.float32))


def reduce(comm: Communicator, count: int = 100, algorithm: str | None = None) -> None:
    comm.all_reduce(ones(comm, count), algorithm=algorithm)
    comm.synchronize()


# -- hangs ---


# two_shot runs only with --full, because its kernel's waits look like one_shot's.
@pytest.mark.parametrize("algorithm", ["one_shot", pytest.param("two_shot", marks=pytest.mark.full), "ring", "proxy"])
def test_one_rank_never_calls(reports: Path, algorithm: str) -> None:
    def body(comm: Communicator) -> None:
        reduce(comm, algorithm=algorithm)
        impatient(comm)
        if comm.rank == 2:
            await_reports(reports, 4)
        else:
            wait_out(lambda: (reduce(comm, 5000, algorithm), comm.barrier(), comm.synchronize()))

    run_ranks(4, body)
    finding = told(reports).findings[0]
    assert finding.about == ["rank 2"]
    if algorithm == "ring":  # a kernel that gives up still sends, so the next rank's kernel continues
        assert finding.reasons[0].startswith("rank 2 has not called ")
    else:
        assert finding.text == "Ranks 0, 1 and 3 wait for rank 2."
        call = f"all_reduce #2 (dtype float32, op sum, algorithm {algorithm}, root 0, count 5000)"
        assert finding.reasons[0].startswith(f"rank 2 has not called {call}")
    assert finding.reasons[0].endswith("its last call is all_reduce #1")
    assert any("no kernel of rank 2 waits" in reason and "await_reports" in reason for reason in finding.reasons)


def test_different_orders_on_two_communicators(reports: Path) -> None:
    seconds = ThreadBootstrap.create(3)

    def body(first: Communicator) -> None:
        with Communicator(seconds[first.rank], timeout=first.timeout) as second:
            reduce(first)
            reduce(second)
            impatient(first)
            impatient(second)
            one, other = (second, first) if first.rank == VICTIM else (first, second)

            def both() -> None:
                reduce(one)
                reduce(other)

            wait_out(both)

    run_ranks(3, body)
    diagnosis = told(reports)
    finding = found(diagnosis, "circle")
    assert "rank 1" in finding.about
    assert sorted(finding.about + finding.waiting) == ["rank 0", "rank 1", "rank 2"]
    within = {reason.split()[4]: reason.rpartition("communicator ")[2].split()[0] for reason in finding.reasons}
    assert len(set(within.values())) == 2, "each waits in a communicator of its own"
    assert set(within.values()) == set(diagnosis.communicators)


def test_different_orders_on_one_communicator(reports: Path) -> None:
    def body(comm: Communicator) -> None:
        calls = [lambda: reduce(comm), lambda: (comm.broadcast(ones(comm)), comm.synchronize())]

        def in_turn() -> None:
            for call in reversed(calls) if comm.rank == VICTIM else calls:
                call()

        reduce(comm)
        impatient(comm)
        wait_out(in_turn)

    run_ranks(3, body)
    finding = found(told(reports), "mismatch")
    assert finding.text == "Ranks differ in call #2."
    assert any(reason.startswith("rank 1: broadcast (") for reason in finding.reasons)
    assert any("all_reduce (" in reason for reason in finding.reasons)


def test_a_kernel_waits_for_a_signal_that_nobody_sends(reports: Path) -> None:
    def body(comm: Communicator) -> None:
        channels = comm.proxy_channels(comm.empty(64))
        kernels = comm.compile(KERNELS)
        impatient(comm)
        if comm.rank == 0:
            kernels.send(1, 1, channels.to(1))
            wait_out(lambda: comm.barrier() or comm.synchronize())
        elif comm.rank == 1:
            kernels.wait(1, 1, channels.to(0))
            kernels.wait(1, 1, channels.to(0))
            wait_out(comm.synchronize)
        else:
            wait_out(lambda: comm.barrier() or comm.synchronize())
        await_reports(reports, 3)

    run_ranks(3, body)
    diagnosis = told(reports)
    finding = found(diagnosis, "circle")  # ranks 0 and 2 wait for rank 1 in a barrier
    assert any("rank 1 waits for a signal (ProxyChannel) from rank 0: expected 2, saw 1" in r for r in finding.reasons)
    assert any(
        reason.startswith("rank 0 has waited") and "the first collective" in reason for reason in finding.reasons
    )


def test_a_signal_that_a_rank_has_not_sent(reports: Path) -> None:
    def body(comm: Communicator) -> None:
        channels = comm.proxy_channels(comm.empty(64))
        kernels = comm.compile(KERNELS)
        impatient(comm)
        if comm.rank == 0:
            kernels.send(1, 1, channels.to(1))
            await_reports(reports, 2)
        else:
            for _ in range(2):
                kernels.wait(1, 1, channels.to(0))
            wait_out(comm.synchronize)

    run_ranks(2, body)
    finding = found(told(reports), "waits_for")
    assert finding.text == "Rank 1 waits for rank 0."
    assert any(re.search("rank 0 has sent 1 signal to channel .* waits for number 2", r) for r in finding.reasons)


@pytest.mark.own_proxy(reason="the daemon has rings without handlers")
def test_a_ring_behind_a_handler_that_blocks(reports: Path) -> None:
    kept: list[object] = []  # arrays that the proxy accesses even after the communicator has failed
    with Gate() as gate:

        def body(comm: Communicator) -> None:
            channels = comm.proxy_channels(comm.empty(64))
            kept.append(channels)
            kernels = comm.compile(KERNELS)
            handled = comm.handler_channel(lambda _: gate.wait())
            impatient(comm)
            if comm.rank == 0:
                kernels.call_handler(1, 1, handled)
                for _ in range(3):
                    kernels.send(1, 1, channels.to(1))
                await_reports(reports, 2)
                gate.open()
            else:
                kernels.wait(1, 1, channels.to(0))
                wait_out(comm.synchronize)

        run_ranks(2, body)
    diagnosis = told(reports)
    proxy = found(diagnosis, "proxy")
    assert proxy.text == "Rank 0 is held up by its own proxy."
    assert proxy.waiting == ["rank 1"]
    (reason,) = proxy.reasons
    assert re.match(r"its proxy has been in the handler of channel \d+ for [\d.]+ s; its rings hold 4 triggers", reason)
    assert found(diagnosis, "waits_for").text == "Rank 1 waits for rank 0."


def test_a_kernel_that_waits_for_its_own_handler(reports: Path) -> None:
    with Gate() as gate:

        def body(comm: Communicator) -> None:
            kernels, handled = comm.compile(KERNELS), comm.handler_channel(lambda _: gate.wait())
            impatient(comm)
            kernels.flush_handler(1, 1, handled)
            wait_out(comm.synchronize)
            gate.open()

        run_ranks(1, body)
    proxy = found(told(reports), "proxy")
    assert any("a flush" in reason for reason in proxy.reasons)
    assert any("has been in the handler" in reason for reason in proxy.reasons)


def test_a_rank_that_does_not_come_to_a_registration(reports: Path) -> None:
    def body(comm: Communicator) -> None:
        impatient(comm)
        if comm.rank == VICTIM:
            await_reports(reports, 3)
        else:
            wait_out(lambda: comm.register(comm.empty(4)))

    run_ranks(3, body)
    finding = found(told(reports), "waits_for")
    assert finding.text == "Ranks 0 and 2 wait for rank 1."
    assert any(re.search("for all ranks to reach register; rank 1 has not", reason) for reason in finding.reasons)


def test_a_rank_that_was_killed(reports: Path) -> None:
    ended = run_processes(PROCESSES, PROGRAM, "killed", env={"PROXYCCL_REPORT_DIR": str(reports)})
    assert [process.returncode for process in ended] == [-9 if rank == VICTIM else 0 for rank in range(PROCESSES)]
    diagnosis = told(reports)
    assert diagnosis.reported == [[rank for rank in range(PROCESSES) if rank != VICTIM]]
    finding = diagnosis.findings[0]
    assert finding.about == ["rank 1"]
    assert any("its process ended, as rank" in text for text in (finding.text, *finding.reasons))


# -- `proxyccl doctor` ---


@pytest.fixture(scope="module")
def hang(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes reports of three ranks, of which rank 1 has made only the first of two calls. Returns their directory."""
    require_devices(3)
    directory = tmp_path_factory.mktemp("hang")

    def body(comm: Communicator) -> None:
        reduce(comm)
        impatient(comm)
        if comm.rank == VICTIM:
            await_reports(directory, 3)
        else:
            wait_out(lambda: reduce(comm))

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROXYCCL_REPORT_DIR", str(directory))
        run_ranks(3, body)
    return directory


def doctor(*arguments: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "proxyccl", "doctor", *map(str, arguments)]
    environment = {**os.environ, **(env or {})}
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert "Traceback" not in result.stderr
    return result


def test_the_command_says_who_waits_for_whom(hang: Path) -> None:
    result = doctor(hang)
    assert result.returncode == 0, result.stderr
    assert "reports of all 3 ranks" in result.stdout
    assert "Ranks 0 and 2 wait for rank 1." in result.stdout
    assert "rank 1 has not called all_reduce #2" in result.stdout
    assert "last collective calls" not in result.stdout
    assert "last collective calls" in doctor("--full", hang).stdout


def test_the_command_for_programs(hang: Path) -> None:
    result = doctor("--json", *sorted(hang.iterdir()))
    (diagnosis,) = json.loads(result.stdout)
    assert diagnosis["reported"] == [[0, 1, 2]]
    assert diagnosis["findings"][0]["about"] == ["rank 1"]
    assert diagnosis["findings"][0]["waiting"] == ["rank 0", "rank 2"]


def test_without_arguments_it_takes_the_newest(hang: Path, tmp_path: Path) -> None:
    result = doctor(env={"PROXYCCL_REPORT_DIR": str(hang)})
    assert "Ranks 0 and 2 wait for rank 1." in result.stdout
    result = doctor(env={"PROXYCCL_REPORT_DIR": str(tmp_path / "nowhere")})
    assert result.returncode == 1
    assert str(tmp_path / "nowhere") in result.stderr


def test_with_the_report_of_one_rank_missing(hang: Path) -> None:
    others = [path for path in hang.iterdir() if "rank1" not in path.name]
    result = doctor(*others)
    assert result.returncode == 0
    assert "reports of ranks 0 and 2" in result.stdout
    assert "Ranks 0 and 2 wait for rank 1." in result.stdout
    assert "rank 1 wrote no report: its process" in result.stdout


def test_one_report_alone_is_printed_whole(hang: Path) -> None:
    (path,) = hang.glob("*rank0*")
    result = doctor(path)
    assert "kernels wait for" in result.stdout
    assert "Rank 0 waits for rank 1." in result.stdout


def test_reports_of_two_jobs_are_told_apart(hang: Path, tmp_path: Path) -> None:
    for report in find([hang]).ranks:
        other = replace(report, communicator="0" * 8, written="2020-01-01T00:00:00.000+00:00", waits=[])
        path = tmp_path / f"{other.communicator}-rank{other.rank}-1-1.json"
        path.write_text(other.encode())
    result = doctor(hang, tmp_path)
    assert result.returncode == 0
    one, other = result.stdout.split("communicator ")[1:]
    assert one.startswith(next(hang.iterdir()).name[:8])  # the newest job comes first
    assert "Ranks 0 and 2 wait for rank 1." in one
    assert other.startswith("0" * 8)
    assert "no rank waits for another" in other


def test_one_report_is_enough_where_its_error_says_why(hang: Path) -> None:
    report = next(report for report in find([hang]).ranks if report.rank == 0)
    failure = Failure("TriggerError", "rank 2 put 64 bytes at offset 128, which leaves its memory", 2, None)
    (diagnosis,) = diagnose([replace(report, waits=[], failure=failure)])
    first = diagnosis.findings[0]
    assert (first.kind, first.about, first.text) == ("failed", ["rank 2"], "Rank 2 ended the communicator.")
    assert first.reasons == [f"rank 0 has TriggerError: {failure.message}"]


def test_with_nothing_to_say_the_exit_code_tells(hang: Path, tmp_path: Path) -> None:
    for report in find([hang]).ranks:
        (tmp_path / f"{report.communicator}-rank{report.rank}-1-1.json").write_text(replace(report, waits=[]).encode())
    result = doctor(tmp_path)
    assert result.returncode == 1
    assert "no rank waits for another" in result.stdout


def test_nonsense_is_refused_by_name(hang: Path, tmp_path: Path) -> None:
    (nonsense := tmp_path / "notes.txt").write_text("who waits for whom?")
    result = doctor(nonsense)
    assert result.returncode == 1
    assert f"invalid report from {nonsense}: expected JSON, got b'who waits for whom?'" in result.stderr
    (broken := tmp_path / f"{'0' * 8}-rank0-1-1.json").write_text("{}")
    result = doctor(tmp_path, hang)
    assert result.returncode == 0, "what is wrong in a directory does not hide the rest"
    assert str(broken) in result.stderr


# -- conclusions from reports alone ---


def sample(hang: Path) -> dict[int, Report]:
    return {report.rank: report for report in find([hang]).ranks}


def test_who_waits_through_others_waits_for_the_last(hang: Path) -> None:
    """Rank 0 waits for 1, 1 for 2 and 2 for nobody, so 2 is the cause."""
    reports = sample(hang)
    wait = reports[0].waits[0]
    chain = [
        replace(reports[0], waits=[replace(wait, peer=1)]),
        replace(reports[1], waits=[replace(wait, peer=2)]),
        replace(reports[2], waits=[]),
    ]
    (diagnosis,) = diagnose(chain)
    finding = found(diagnosis, "waits_for")
    assert finding.text == "Ranks 0 and 1 wait for rank 2."


def test_a_cycle_that_waits_for_one_more_waits_for_that_one(hang: Path) -> None:
    """The cause is a rank that does not wait, even if ranks that wait for it also wait for each other in a cycle."""
    reports = sample(hang)
    wait = reports[0].waits[0]
    both = [
        replace(reports[0], waits=[replace(wait, peer=1), replace(wait, peer=2)]),
        replace(reports[2], waits=[replace(wait, peer=1), replace(wait, peer=0)]),
        replace(reports[1], waits=[]),
    ]
    (diagnosis,) = diagnose(both)
    assert [finding.kind for finding in diagnosis.findings] == ["waits_for"]
    assert diagnosis.findings[0].text == "Ranks 0 and 2 wait for rank 1."


def test_of_many_that_wait_for_one_some_are_shown(hang: Path) -> None:
    report = sample(hang)[0]
    members = [Member("elsewhere", 1000 + rank, 1) for rank in range(30)]
    waits = [replace(report.waits[0], peer=1)]
    many = [replace(report, rank=rank, members=members, waits=waits) for rank in range(2, 30)]
    (diagnosis,) = diagnose(many)
    finding = found(diagnosis, "waits_for")
    assert len(finding.waiting) == 28
    assert finding.reasons[-1] == "and 20 more"


def test_a_barrier_is_shown_without_arguments() -> None:
    fields = {"collective": "barrier", "dtype": "uint8", "op": "sum", "algorithm": "any", "root": "0", "count": "1"}
    assert with_arguments("barrier #3", Call(3, fields)) == "barrier #3"
    assert with_arguments("reduce #4", Call(4, {"collective": "reduce", "root": "2"})) == "reduce #4 (root 2)"


def silent(hang: Path, member: Member) -> str:
    """Returns the conclusion about rank 1, whose process wrote no report."""
    reports = [sample(hang)[rank] for rank in (0, 2)]
    members = [member if rank == VICTIM else other for rank, other in enumerate(reports[0].members)]
    (diagnosis,) = diagnose([replace(report, members=members) for report in reports])
    (said,) = (reason for reason in found(diagnosis, "waits_for").reasons if "wrote no report" in reason)
    return said.partition(": ")[2]


def test_the_signal_is_advised_only_where_it_ends_nothing(hang: Path) -> None:
    own = sample(hang)[0].process
    assert silent(hang, own) == f"its process {own.pid} still runs; to make it write one: kill -USR1 {own.pid}"
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            reused = silent(hang, replace(own, pid=other.pid))
            deaf = silent(hang, replace(own, pid=other.pid, started=start_of(other.pid)))
        finally:
            other.kill()
    assert reused == f"its process {other.pid} has ended; {other.pid} is another process now"
    assert deaf == f"its process {other.pid} still runs; it writes no reports, as it does not handle SIGUSR1"
    assert silent(hang, replace(own, pid=other.pid)) == f"its process {other.pid} has ended"


def test_reports_that_are_far_apart_are_said_to_be(hang: Path) -> None:
    reports = sample(hang)
    early = replace(reports[0], written=time.strftime("2020-01-01T00:00:00.000+00:00"))
    (diagnosis,) = diagnose([early, reports[1], reports[2]])
    assert any("apart" in note for note in diagnosis.notes)


def test_the_newest_report_of_a_rank_counts(hang: Path) -> None:
    reports = [  # higher ranks wrote earlier, and each rank has its own proxy process
        replace(
            report,
            written=f"2026-01-01T00:00:0{3 - rank}.000+00:00",
            daemon=replace(report.members[rank], pid=1 << 23 | rank),
        )
        for rank, report in sample(hang).items()
    ]
    older = replace(reports[0], written="2020-01-01T00:00:00.000+00:00", waits=[])
    (diagnosis,) = diagnose([*reports, older])
    assert [diagnosis] == diagnose(reports)
    of_daemons = [note for note in diagnosis.notes if "wrote no report" in note]
    assert [re.findall(r"rank \d", note) for note in of_daemons] == [["rank 0"], ["rank 1"], ["rank 2"]]
