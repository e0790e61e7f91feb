"""Reports of the node daemon: when it writes them, their contents, and the doctor's conclusions."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace

from proxyccl import ArgumentError, Communicator, Operation, ProxyCCLError, Trigger
from proxyccl.__main__ import main
from proxyccl.channels.reports import daemons
from proxyccl.channels.reports.diagnosis import Diagnosis, diagnose
from proxyccl.channels.reports.find import find
from proxyccl.channels.reports.render import render
from proxyccl.channels.reports.report import Report
from proxyccl.device.host import HostRuntime
from proxyccl.device.runtime import Memory
from proxyccl.proxy.daemon import reporter
from proxyccl.proxy.daemon.client import DaemonClient
from proxyccl.proxy.daemon.protocol import LONGEST_FRAME
from proxyccl.proxy.daemon.report import Client, DaemonReport, Request
from proxyccl.proxy.daemon.server import Daemon
from proxyccl.proxy.reports import files
from proxyccl.proxy.reports.document import ReportError
from proxyccl.proxy.thread import IdlePolicy
from proxyccl.proxy.trigger import PARITY_SHIFT
from support.daemons import RunningDaemon, daemon_inside, running_daemon
from support.device_arrays import barrier
from support.fakes.raw_client import DONE, RawClient, frame_of
from support.hanging import hang
from support.observing import KERNELS, channels_of
from support.ranks import Gate
from support.running import TIMEOUT, impatient, run_alone, run_ranks, wait_for

NAMED: dict[str, Any] = {"description": {"job": "0badcafe", "rank": 5, "world_size": 8, "program": "raw"}}
IDLE = IdlePolicy(max_sleep_us=700.0)
WAITING = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void wait(DeviceHandle<ProxyChannel>* channels) { channels[0].wait(); }
"""


@pytest.fixture
def reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "reports"
    monkeypatch.setenv("PROXYCCL_REPORT_DIR", str(directory))
    return directory


@pytest.fixture
def daemon(reports: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningDaemon]:
    """A daemon for the test's ranks. Daemon and ranks write reports to the same directory."""
    monkeypatch.setenv("PROXYCCL_DAEMON_SOCKET", str(tmp_path / "socket"))
    monkeypatch.setenv("PROXYCCL_PROXY", "daemon")
    with running_daemon(tmp_path / "socket", "--threads", "2") as running:
        yield running
    assert running.ended == 0, running.log


def written(directory: Path, count: int = 1) -> list[DaemonReport]:
    """Waits until there are `count` reports of the daemon, and returns its reports."""
    wait_for(lambda: len(list(directory.glob("*-daemon-*.json"))) >= count, "the daemon reports")
    return find([directory]).daemons


def report_of(running: RunningDaemon, directory: Path) -> DaemonReport:
    running.process.send_signal(signal.SIGUSR1)
    (report,) = written(directory)
    return report


# -- contents of reports, and what must not delay them ---


def test_the_daemon_reports_on_a_signal_and_goes_on(daemon: RunningDaemon, reports: Path) -> None:
    run_ranks(2, channels_of)  # some resources of the first job stay until the daemon exits
    wait_for(lambda: daemon.log.count("has left") == 2, "they have left")
    before = daemon.resources()
    found: list[DaemonReport] = []
    jobs: list[str] = []

    def body(comm: Communicator) -> None:
        channels = channels_of(comm)
        if comm.rank == 0:
            comm.compile(KERNELS, "mixed")(1, 1, channels, 4, 3, 1)
            comm.synchronize()
            wait_for(lambda: comm.proxy.outstanding(channels[0].id) == 0, "all is complete")
            found.append(report_of(daemon, reports))
            jobs.append(comm.job)
        comm.all_gather_bytes(b"")
        comm.all_reduce(comm.empty(100), algorithm="proxy")
        comm.synchronize()

    run_ranks(2, body, idle=IDLE)
    (report,), (job,) = found, jobs
    assert report.cause == "signal SIGUSR1"
    assert report.process.pid == daemon.process.pid
    assert report.socket == str(daemon.path)
    assert report.unread == []
    assert report.longest_sleep == IDLE.max_sleep_us / 1e6
    assert [thread.name for thread in report.threads] == ["proxyccl-proxy-0", "proxyccl-proxy-1"]
    for thread in report.threads:
        assert set(thread.cores) == os.sched_getaffinity(0)
        assert thread.core in thread.cores
        assert Path(f"/proc/{daemon.process.pid}/task/{thread.number}").is_dir()
    assert len(report.clients) == 2
    client = report.client_of(job, 0)
    assert client is not None
    assert (client.pid, client.request, client.failure) == (os.getpid(), None, None)
    (worker,) = client.workers
    assert not worker.ended
    assert worker.looks_meanwhile > 0
    (ring,) = client.rings
    assert (ring.taken, ring.full) == (8, 0)
    assert [trigger.operation for trigger in ring.recent] == ["data"] * 4 + ["signal"] * 3 + ["flush"]
    (channel,), (way,) = client.channels, client.connections
    assert (channel.triggers, channel.puts, channel.signals, channel.flushes, channel.errors) == (8, 4, 3, 1, 0)
    assert (way.peer, way.transport, way.completed, way.outstanding, way.errors) == (1, "copy", 8, 0, 0)
    assert daemon.settles(before), (before, daemon.resources())


@pytest.fixture
def inside(reports: Path, tmp_path: Path) -> Iterator[Daemon]:
    with daemon_inside(tmp_path / "socket") as running:
        yield running


def test_a_client_whose_request_hangs_keeps_no_report_back(
    inside: Daemon, reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Gate() as gate:
        hangs = threading.Event()

        def hang_in_the_driver(_: HostRuntime, __: bytes) -> Memory:
            hangs.set()
            gate.wait()
            raise ArgumentError("handle", "it took too long")

        monkeypatch.setattr(HostRuntime, "open", hang_in_the_driver)
        running = RunningDaemon(inside.path, None)
        with RawClient(running) as client, RawClient(running) as other:
            assert client.open(**NAMED)["kind"] == "answer"
            assert other.opens()
            handle = client.buffer.export(client.buffer.ptr, 4096)
            client.connection.send(frame_of({"do": "add_memory", "keys": [], "handle": handle, "nbytes": 4096}))
            assert hangs.wait(TIMEOUT)
            inside.reporter.write("a test")
            (report,) = written(reports)
            gate.open()
            assert json.loads(client.connection.recv(LONGEST_FRAME))["argument"] == "handle"
    stuck = report.client_of("0badcafe", 5)
    assert stuck is not None
    assert stuck.request is not None
    assert stuck.request.name == "add_memory"
    assert "its request add_memory has been in progress" in daemons.remarks(report, stuck, rings=False)[0]
    (silent,) = (client for client in report.clients if client.description is None)
    assert (silent.pid, silent.rings) == (os.getpid(), [])
    assert report.unread == []


def test_a_thread_held_by_a_driver_keeps_no_report_back(
    inside: Daemon, reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Gate() as gate:
        held = threading.Event()

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        def copy(*_: object) -> int:
            held.set()
            gate.wait()
            return 0

        address = ctypes.cast(copy, ctypes.c_void_p).value
        functions = replace(HostRuntime.calls, copy=address)
        monkeypatch.setattr(HostRuntime, "calls", functions)
        running = RunningDaemon(inside.path, None)
        with RawClient(running) as client, RawClient(running) as other:
            assert client.open(**NAMED)["kind"] == "answer"
            assert other.open(description={**NAMED["description"], "rank": 6})["kind"] == "answer"
            used = client.use()
            assert client.say(client.set_channel(used, offset=1024)) == DONE
            put = Trigger(Operation.DATA, used["channel"], 8, used["first"], 0, used["first"], 64)
            slots = (ctypes.c_uint64 * 2).from_address(client.ring.ptr)
            slots[0], slots[1] = put.encode()[0], put.encode()[1] | 1 << PARITY_SHIFT
            assert held.wait(TIMEOUT)
            inside.reporter.write("a test")
            (report,) = written(reports)
            gate.open()
        wait_for(lambda: inside.clients == 0, "the last call of `copy` has ended")
    for rank in (5, 6):  # one thread runs both ranks' workers
        client_of_rank = report.client_of("0badcafe", rank)
        assert client_of_rank is not None
        assert [(worker.ended, worker.looks_meanwhile) for worker in client_of_rank.workers] == [(False, 0)]
        assert "did not look at its rings" in daemons.remarks(report, client_of_rank, rings=False)[0]


def test_a_client_that_goes_while_it_is_reported_on(
    inside: Daemon, reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = RawClient(RunningDaemon(inside.path, None))
    assert client.open(**NAMED)["kind"] == "answer"
    client.use()
    sleep, writer = time.sleep, threading.get_ident()
    with monkeypatch.context() as pausing:

        def leave_first(seconds: float) -> None:
            """Ends the client in the report's pause between two looks at the client's workers."""
            if threading.get_ident() != writer:
                sleep(seconds)
                return
            pausing.undo()
            client.connection.close()
            wait_for(lambda: inside.clients == 0, "the client has left")

        pausing.setattr(time, "sleep", leave_first)
        assert inside.reporter.write("a test") is not None
    (report,) = written(reports)
    assert report.unread == []
    (left,) = report.clients
    assert [worker.ended for worker in left.workers] == [True]
    assert len(left.rings) == len(left.connections) == 1


def test_a_client_that_asks_and_leaves_is_in_the_report(inside: Daemon, reports: Path) -> None:
    with RawClient(RunningDaemon(inside.path, None)) as client:
        assert client.open(**NAMED)["kind"] == "answer"
        client.connection.send(frame_of({"do": "write_report", "cause": "all is wrong" * 100}))
    (report,) = written(reports)
    assert report.client_of("0badcafe", 5) is not None
    assert report.cause.startswith(f"process {os.getpid()} (rank 5 of job 0badcafe): all is wrong")
    assert len(report.cause) < 300


def test_no_report_waits_for_the_daemons_lock(inside: Daemon, reports: Path) -> None:
    """Reports must not wait for the daemon's lock, because the daemon holds it during driver calls, which may hang."""
    with inside._lock:
        writing = threading.Thread(target=inside.reporter.write, args=("a test",), daemon=True)
        writing.start()
        writing.join(TIMEOUT)
        assert not writing.is_alive()
    assert len(written(reports)) == 1


def test_what_can_not_be_read_of_a_client_is_said(
    inside: Daemon, reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("not today")

    monkeypatch.setattr(reporter, "Observer", refuse)
    with RawClient(RunningDaemon(inside.path, None)) as client:
        assert client.open(**NAMED)["kind"] == "answer"
        inside.reporter.write("a test")
    (report,) = written(reports)
    (note,) = report.unread
    assert note.endswith("RuntimeError: not today")
    assert report.client_of("0badcafe", 5) is not None
    assert len(report.threads) == 1


# -- when a report is written ---


def test_ranks_that_time_out_have_the_daemon_report(daemon: RunningDaemon, reports: Path) -> None:
    run_ranks(2, hang)
    report = written(reports)[0]
    ranks = find([reports]).ranks
    assert [rank.daemon and structs.asdict(rank.daemon) for rank in ranks] == [structs.asdict(report.process)] * 2
    job = ranks[0].communicator
    assert f"communicator {job}: the communicator failed" in report.cause
    sender = report.client_of(job, 0)
    assert sender is not None
    assert [trigger.operation for trigger in sender.rings[0].recent] == ["data+signal+flush"] * 2
    assert [client.request for client in report.clients] == [None, None]
    wait_for(lambda: "report: " in daemon.log, "the daemon says so")


def test_a_proxy_that_fails_is_in_the_daemons_report(daemon: RunningDaemon, reports: Path) -> None:
    def body(comm: Communicator) -> None:
        channels = comm.proxy_channels(comm.empty(8, "uint8"))
        barrier(comm)
        if comm.rank == 0:
            comm.compile(KERNELS, "mixed")(1, 1, channels, 1, 0, 0)  # puts 100 bytes from a source of 8 bytes
        wait_for(lambda: comm.group.failure.aborted, "the trigger is refused")
        comm.check()

    with pytest.raises(ProxyCCLError, match="leaves the source memory"):
        run_ranks(2, body)
    report = written(reports)[0]
    (failed,) = (client for client in report.clients if client.failure is not None)
    assert failed.description is not None
    assert failed.description.rank == 0
    assert "leaves the source memory" in failed.failure
    assert "on channel 0 to rank 1" in failed.failure
    assert failed.channels[0].errors == 1
    assert any("its proxy failed: " in text for text in daemons.remarks(report, failed, rings=False))


def test_ranks_that_ask_at_once_get_one_report_for_their_job(
    inside: Daemon, reports: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for job, cause in (("a", "first"), ("a", "second"), ("b", "third")):
        inside.reporter.request(job, cause)
    written(reports, 2)
    monkeypatch.setattr(reporter, "_COVERED_SECONDS", 0.0)
    inside.reporter.request("a", "later")
    assert sorted(report.cause for report in written(reports, 3)) == ["first", "later", "third"]


def test_no_report_of_an_abort_that_the_program_asked_for(daemon: RunningDaemon, reports: Path) -> None:
    def body(comm: Communicator) -> None:
        assert isinstance(comm.proxy, DaemonClient)
        comm.abort("enough")

    run_ranks(1, body)
    daemon.end()
    assert not reports.exists()


def test_reports_can_be_turned_off(tmp_path: Path, reports: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_REPORTS", "off")
    with running_daemon(tmp_path / "socket") as running:
        running.end(signal.SIGUSR1)
        assert running.ended == -signal.SIGUSR1
    begun: list[object] = []
    monkeypatch.setattr(reporter, "Thread", lambda *arguments: begun.append(arguments))
    with Daemon(tmp_path / "another") as inside:
        inside.reporter.request("a", "all is wrong")
    assert not begun
    assert not reports.exists()
    monkeypatch.setenv("PROXYCCL_REPORTS", "perhaps")
    refused = run_alone("-m", "proxyccl", "daemon", "--socket", str(tmp_path / "socket"))
    assert refused.returncode == 2
    assert "PROXYCCL_REPORTS" in refused.stderr


def test_a_report_that_can_not_be_written_is_logged(
    inside: Daemon, reports: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reports.touch()
    assert inside.reporter.write("a test") is None
    assert "cannot write a report" in caplog.text


# -- files ---


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Report], DaemonReport]:
    """The reports of a job of two ranks, in which rank 1 waits for rank 0."""
    directory = tmp_path_factory.mktemp("sample")

    def body(comm: Communicator) -> None:
        channels, kernel = channels_of(comm), comm.compile(WAITING, "wait")
        impatient(comm)
        if comm.rank == 1:
            kernel(1, 1, channels)
            with contextlib.suppress(ProxyCCLError):
                comm.synchronize()
        wait_for(lambda: len(list((directory / "reports").glob("*.json"))) == 3, "all report")

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROXYCCL_REPORT_DIR", str(directory / "reports"))
        patch.setenv("PROXYCCL_DAEMON_SOCKET", str(directory / "socket"))
        with running_daemon(directory / "socket"):
            run_ranks(2, body, proxy="daemon")
    found = find([directory / "reports"])
    (report,) = found.daemons
    return sorted(found.ranks, key=lambda rank: rank.rank), report


Sample = tuple[list[Report], DaemonReport]


def test_a_report_is_read_back_as_it_was_written(sample: Sample, tmp_path: Path) -> None:
    (file := tmp_path / "report").write_text(sample[1].encode())
    assert find([file]).daemons == [sample[1]]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 99}, "version: unknown value 99; expected 4"),
        ({"clients": [{}]}, r"clients\[0\]: field 'pid' is missing"),
        ({"threads": None}, "threads: expected array, got None"),
        ({"format": "another"}, "format: unknown value 'another'; expected one of proxyccl report, proxyccl daemon"),
    ],
)
def test_nonsense_is_refused_and_the_file_named(
    sample: Sample, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    (file := tmp_path / "nonsense.json").write_text(json.dumps({**json.loads(sample[1].encode()), **changes}))
    with pytest.raises(ReportError, match=rf"nonsense\.json.*{reason}"):
        find([file])


def test_a_report_reads_as_text(sample: Sample) -> None:
    text = daemons.render(sample[1])
    assert f"node daemon, process {sample[1].process.pid} on " in text
    assert "; 2 clients" in text
    assert "proxyccl-proxy-0 " in text
    assert f"rank 1 of 2 of communicator {sample[0][0].communicator}" in text
    assert "  connection 0 of worker 0 to rank 0 by copy: " in text
    assert "  channel 0 to rank 0 by copy, ring 0: " in text
    assert "  ring 0: 0 of 8192 slots full" in text
    assert f"in the node daemon, process {sample[1].process.pid}" in render(sample[0][0])


# -- the doctor ---


def changed(sample: Sample, rank: int, **changes: Any) -> DaemonReport:
    """Returns the daemon's report with changed facts about a rank."""
    ranks, report = sample
    own = report.client_of(ranks[0].communicator, rank)
    return replace(report, clients=[replace(c, **changes) if c is own else c for c in report.clients])


def told(ranks: list[Report], *of_daemons: DaemonReport) -> Diagnosis:
    (diagnosis,) = diagnose(ranks, of_daemons)
    return diagnosis


def client_of(sample: Sample, rank: int) -> Client:
    client = sample[1].client_of(sample[0][0].communicator, rank)
    assert client is not None
    return client


def reason_of(sample: Sample, of_daemon: DaemonReport, ranks: list[Report] | None = None) -> str:
    """Returns the part of the doctor's finding about rank 0 that concerns rank 0's daemon."""
    finding = told(ranks or sample[0], of_daemon).findings[0]
    assert finding.about == ["rank 0"]
    (reason,) = (reason for reason in finding.reasons if f"the node daemon, process {sample[1].process.pid}" in reason)
    return reason


def test_the_daemons_word_is_added_of_a_rank_waited_for(sample: Sample) -> None:
    assert told(*sample).daemons == [sample[1].process]
    assert told(*sample).findings[0].text == "Rank 1 waits for rank 0."
    assert reason_of(sample, sample[1]).endswith(": nothing is outstanding")
    way = replace(client_of(sample, 0).connections[0], outstanding=3)
    busy = reason_of(sample, changed(sample, 0, connections=[way], request=Request("drain", 2.5)))
    assert "3 triggers to rank 1 by copy issued but not known to be complete" in busy
    assert "its request drain has been in progress for 2.5 s" in busy


def test_a_thread_of_the_daemon_that_something_holds_is_told(sample: Sample) -> None:
    (worker,) = client_of(sample, 0).workers
    held = changed(sample, 0, workers=[replace(worker, ended=False, looks_meanwhile=0)])
    held = replace(held, threads=[replace(thread, state="D") for thread in held.threads])
    reason = reason_of(sample, held)
    assert f"worker 0 did not look at its rings for {held.meanwhile:g} s" in reason
    assert "the thread proxyccl-proxy-0 is held in the kernel" in reason
    assert "did not look" not in reason_of(sample, changed(sample, 0, workers=[replace(worker, ended=True)]))


def test_a_thread_of_the_daemon_that_may_only_sleep_is_not_told(sample: Sample) -> None:
    (worker,) = client_of(sample, 0).workers
    still = changed(sample, 0, workers=[replace(worker, ended=False, looks_meanwhile=0)])

    def reason(longest_sleep: float, state: str) -> str:
        threads = [replace(thread, state=state) for thread in still.threads]
        return reason_of(sample, replace(still, longest_sleep=longest_sleep, threads=threads))

    assert "did not look" not in reason(still.meanwhile, "S")
    assert "did not look" in reason(still.meanwhile, "D")
    assert "did not look" in reason(still.meanwhile / 100, "S")


def test_a_rank_that_has_no_session_any_more(sample: Sample) -> None:
    ranks, report = sample
    without = replace(report, clients=[client_of(sample, 1)])
    process = sample[1].process.pid
    assert reason_of(sample, without) == f"rank 0 no longer has a session at the node daemon, process {process}"
    silent = reason_of(sample, without, ranks[1:])  # rank 0's report is missing
    assert silent.endswith(", which runs other ranks' proxies")


def test_the_daemon_tells_the_rings_of_a_rank_without_report(sample: Sample) -> None:
    (ring,) = client_of(sample, 0).rings
    full = changed(sample, 0, rings=[replace(ring, full=7)])
    assert "its rings hold 7 triggers that the proxy has not taken" in reason_of(sample, full, sample[0][1:])
    assert "its rings hold" not in reason_of(sample, full)


def test_ranks_in_a_cycle_are_told_what_the_daemon_holds_up(sample: Sample) -> None:
    ranks, report = sample
    wait = replace(ranks[1].waits[0], peer=1)
    circle = [replace(ranks[0], waits=[wait]), ranks[1]]
    assert not any("at the node daemon" in reason for reason in told(circle, report).findings[0].reasons)
    busy = changed(sample, 1, request=Request("drain", 2.5))
    assert told(circle, busy).findings[0].kind == "circle"
    assert any("rank 1 at the node daemon" in reason for reason in told(circle, busy).findings[0].reasons)


def test_a_daemon_that_wrote_no_report_is_asked_for_one(sample: Sample) -> None:
    ranks, report = sample
    named = [replace(rank, daemon=ranks[0].process) for rank in ranks]
    (note,) = told(named).notes
    assert note.startswith("the node daemon that runs the proxy of ranks 0 and 1 wrote no report: its process ")
    assert f"kill -USR1 {os.getpid()}" in note
    (gone,) = told(ranks).notes
    assert gone.endswith(f"its process {report.process.pid} has ended")


def test_of_a_daemons_reports_the_one_of_the_moment_counts(sample: Sample) -> None:
    ranks, report = sample
    early = replace(report, written="2020-01-01T00:00:00.000+00:00", clients=[])
    late = replace(report, written="2100-01-01T00:00:00.000+00:00", clients=[])
    assert told(ranks, early, report, late) == told(ranks, report)
    assert any("apart" in note for note in told(ranks, early).notes)


def test_a_daemon_of_others_is_left_out(sample: Sample) -> None:
    ranks, report = sample
    other = replace(report, process=replace(report.process, pid=1), clients=[])
    assert told(ranks, report, other) == told(ranks, report)


def doctor(*arguments: str | Path) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        main(("doctor", *map(str, arguments)))
    return said.getvalue()


def test_the_command_takes_them_among_others(sample: Sample, tmp_path: Path) -> None:
    ranks, report = sample
    for rank in ranks:
        (tmp_path / f"{rank.communicator}-rank{rank.rank}-1-1.json").write_text(rank.encode())
    (alone := tmp_path / "01234567-daemon-1-1.json").write_text(report.encode())
    said = doctor(tmp_path)
    assert "Rank 1 waits for rank 0." in said
    assert f"report of their node daemon, process {report.process.pid}" in said
    assert "rank 0 at the node daemon" in said
    assert "ring 0: " not in said
    assert daemons.render(report) in doctor("--full", tmp_path)
    assert daemons.render(report) in doctor(alone)
    assert json.loads(doctor("--json", tmp_path))[0]["daemons"] == [structs.asdict(report.process)]


def test_by_default_the_newest_report_of_a_daemon_is_shown(
    sample: Sample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROXYCCL_REPORT_DIR", str(tmp_path))
    ranks, report = sample
    late = replace(report, written="2100-01-01T00:00:00.000+00:00")
    (tmp_path / "01234567-daemon-1-1.json").write_text(report.encode())
    (newest := tmp_path / "01234567-daemon-1-2.json").write_text(late.encode())
    assert doctor().rstrip() == daemons.render(late).rstrip()
    newest.unlink()
    for rank in ranks:
        (tmp_path / f"{rank.communicator}-rank{rank.rank}-1-1.json").write_text(rank.encode())
    assert "has reported since" not in doctor()
    newest.write_text(late.encode())
    said = doctor()
    assert "Rank 1 waits for rank 0." in said
    assert re.search(rf"process {report.process.pid}, is newer and not included: {newest}", said)


def test_the_default_directory_keeps_the_newest_of_them_too(
    inside: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PROXYCCL_REPORT_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(files, "KEPT", 2)
    paths = [inside.reporter.write("a test") for _ in range(3)]
    assert sorted(files.directory().iterdir()) == sorted(path for path in paths[1:] if path)
