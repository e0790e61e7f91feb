"""The node daemon: its ranks work, fail or die, or the daemon dies itself."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxyccl import (
    ArgumentError,
    ClosedError,
    Communicator,
    ProxyLostError,
    RuntimeUnavailableError,
    Trigger,
    TriggerError,
)
from proxyccl.channels.joining import meeting
from proxyccl.proxy.daemon.client import DaemonClient
from proxyccl.proxy.observe import publications
from proxyccl.proxy.observe.reader import Observer
from proxyccl.proxy.verbs.requirements import missing
from support import hanging
from support.cases.span_calls import SpanCalls
from support.daemons import RunningDaemon, running_daemon
from support.device_arrays import barrier, on_device, on_host
from support.devices import most_ranks, processes, require_devices
from support.paths import EXAMPLES, PROGRAMS
from support.processes import run_processes
from support.ranks import Ranks
from support.running import TIMEOUT, impatient, run_alone, run_mpi, run_ranks, wait_for

PROGRAM = PROGRAMS / "failure.py"
SHORT = 3.0
KERNELS = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void wait_for_ever(DeviceHandle<ProxyChannel> channel) { channel.wait(); }
extern "C" __global__ void put_signals(DeviceHandle<ProxyChannel> channel, int count) {
  for (int i = 0; i < count; ++i) {
    channel.putWithSignal(0, 0, 64);
    if (i % 1024 == 1023 && !channel.flush()) return;
  }
}
extern "C" __global__ void take_signals(DeviceHandle<ProxyChannel> channel, int count) {
  for (int i = 0; i < count; ++i) channel.wait();
}
extern "C" __global__ void leave_memory(DeviceHandle<ProxyChannel> channel) { channel.put(0, 1 << 20, 64); }
extern "C" __global__ void flush(ProxyChannelDeviceHandle channel) { channel.flush(); }
extern "C" __global__ void signal(ProxyChannelDeviceHandle channel) { channel.signal(); }
extern "C" __global__ void put_and_flush(DeviceHandle<ProxyChannel> channel) {
  channel.put(0, 0, 64);
  channel.flush();
}
extern "C" __global__ void signal_and_wait(DeviceHandle<ProxyChannel> channel) {
  channel.signal();
  channel.wait();
}
"""


@pytest.fixture(scope="module")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    with running_daemon(tmp_path_factory.mktemp("daemon") / "socket", "--threads", "2") as running:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("PROXYCCL_DAEMON_SOCKET", str(running.path))
            run_ranks(min(4, most_ranks()), all_reduce, proxy="daemon")
        yield running
    assert running.ended == 0, running.log


@pytest.fixture
def daemon(shared_daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch) -> RunningDaemon:
    monkeypatch.setenv("PROXYCCL_DAEMON_SOCKET", str(shared_daemon.path))
    monkeypatch.setenv("PROXYCCL_PROXY", "daemon")
    return shared_daemon


@pytest.fixture
def own_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningDaemon]:
    monkeypatch.setenv("PROXYCCL_DAEMON_SOCKET", str(tmp_path / "socket"))
    monkeypatch.setenv("PROXYCCL_PROXY", "daemon")
    with running_daemon(tmp_path / "socket") as running:
        yield running


caught = functools.partial(hanging.caught, within=TIMEOUT / 2)  # the failure must end the call long before the time-out


def failure_of(comm: Communicator) -> BaseException:
    deadline = time.monotonic() + TIMEOUT
    while (error := caught(comm.check)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return error


def all_reduce(comm: Communicator) -> float:
    x = on_device(comm, np.full(1000, comm.rank + 1.0, np.float32))
    comm.all_reduce(x, algorithm="proxy")
    comm.synchronize()
    return float(on_host(x)[999])


def channels_of(comm: Communicator) -> Any:
    channels = comm.proxy_channels(comm.empty(4096, "uint8"))
    kernels = comm.compile(KERNELS)
    comm.all_gather_bytes(b"")
    return channels, kernels


def exchange(comm: Communicator) -> float:
    """Lets each rank's kernels put and signal to all other ranks, and returns the sum of a collective by proxy."""
    channels, kernels = channels_of(comm)
    for channel in channels:
        kernels["put_signals"](1, 1, channel, 20)
    for channel in channels:
        kernels["take_signals"](1, 1, channel, 20)
    comm.synchronize()
    comm.drain()  # synchronize() waits for the peers' data, and not for this rank's own triggers
    assert [comm.proxy.counters(channel.id).triggers for channel in channels] == [20] * (comm.world_size - 1)
    return all_reduce(comm)


def test_the_daemon_runs_what_a_rank_would(daemon: RunningDaemon) -> None:
    before = daemon.resources()

    def body(comm: Communicator) -> float:
        result = exchange(comm)
        comm.drain()
        assert isinstance(comm.proxy, DaemonClient)
        assert str(daemon.path) in repr(comm.proxy)
        return result

    assert run_ranks(4, body, fifos=2, proxy_threads=2) == [10.0] * 4
    assert daemon.settles(before), (before, daemon.resources())


def test_an_argument_wins_over_the_environment(daemon: RunningDaemon) -> None:
    def body(comm: Communicator) -> bool:
        return isinstance(comm.proxy, DaemonClient)

    assert run_ranks(1, body) == [True]
    assert run_ranks(1, body, proxy="thread") == [False]


def test_ranks_in_the_daemon_mix_with_others(daemon: RunningDaemon) -> None:
    with Ranks(3, options_of=lambda rank: {"proxy": "thread" if rank == 1 else "daemon"}) as ranks:
        assert ranks.run(exchange) == [6.0] * 3


@pytest.mark.host_only(reason="two jobs at a time, and ranks that are threads need a device each")
def test_two_jobs_on_one_daemon(daemon: RunningDaemon) -> None:
    before = daemon.resources()
    results: list[Any] = []

    def job() -> None:
        results.append(run_ranks(3, lambda comm: [exchange(comm), *(all_reduce(comm) for _ in range(20))]))

    jobs = [threading.Thread(target=job) for _ in range(2)]
    for thread in jobs:
        thread.start()
    for thread in jobs:
        thread.join()
    assert results == [[[6.0] * 21] * 3] * 2
    assert daemon.settles(before)


@pytest.mark.host_only(reason="a GPU's memory is shared whoever allocated it")
@pytest.mark.usefixtures("daemon")
def test_memory_that_the_daemon_can_not_reach_is_refused_by_name() -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match="private to its process"):
            comm.proxy_channels(comm.empty(16), np.ones(16, np.float32))

    run_ranks(2, body)


@pytest.mark.usefixtures("daemon")
def test_what_the_daemon_lacks_for_remote_transports_is_told_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    lacks = missing() or pytest.skip("there is RDMA: tests/rdma/soft_roce/test_daemon.py")
    # A rank whose own process lacks transports must still report what the daemon lacks.
    monkeypatch.setattr(meeting, "missing_transports", lambda: {"verbs": "", "staged": ""})
    with pytest.raises(
        RuntimeUnavailableError, match=f"no remote transport between ranks .* lacks it: {re.escape(lacks)}"
    ):
        run_ranks(2, lambda comm: None, transport="verbs")


@pytest.mark.usefixtures("daemon")
def test_handlers_run_in_the_rank_beside_the_daemon() -> None:
    def body(comm: Communicator) -> None:
        seen: list[Trigger] = []
        all_reduce(comm)  # takes channels first
        channel = comm.handler_channel(seen.append)
        comm.compile(KERNELS, "flush")(1, 1, channel)
        comm.synchronize()
        assert [trigger.channel for trigger in seen] == [channel.id]
        assert comm.proxy.counters(channel.id).triggers == 1
        all_reduce(comm)

    run_ranks(2, body)


def test_the_daemons_outstanding_work_is_read_unasked(own_daemon: RunningDaemon) -> None:
    def body(comm: Communicator) -> None:
        handlers = comm.handler_channel(print)
        channels, kernels = channels_of(comm)
        (channel,) = channels
        kernels["put_signals"](1, 1, channel, 3)
        comm.synchronize()
        wait_for(lambda: comm.proxy.outstanding(channel.id) == 0, "all is complete")
        assert comm.proxy.outstanding(handlers.id) is None
        barrier(comm)
        if comm.rank == 0:
            found = {publication.pid: publication for _, publication in publications.find(comm.job, {0})}
            publication = found[own_daemon.process.pid]
            with own_daemon.stopped():
                with Observer(publication) as observer:
                    observer.worker_stats(0).connections[0].issued += 5
                assert comm.proxy.outstanding(channel.id) == 5
        comm.all_gather_bytes(b"")

    run_ranks(2, body)


def test_outstanding_work_that_can_not_be_read_is_left_out(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise ArgumentError("handle", "not for you")

    monkeypatch.setattr("proxyccl.proxy.daemon.client.ObservedSegment", refuse)

    def body(comm: Communicator) -> float:
        result = all_reduce(comm)
        assert comm.proxy.outstanding(0) is None
        return result

    assert run_ranks(2, body) == [3.0] * 2
    assert "not for you" in caplog.text


@pytest.mark.host_only(reason="one job runs beside another, and ranks that are threads need a device each")
def test_a_kernels_bad_trigger_ends_its_job_and_no_other(daemon: RunningDaemon) -> None:
    before = daemon.resources()

    def bystander(comm: Communicator) -> None:
        all_reduce(comm)

        def bad(other: Communicator) -> BaseException | None:
            channels, kernels = channels_of(other)
            if other.rank == 0:
                kernels["leave_memory"](1, 1, channels[0])
            error = caught(lambda: (kernels["wait_for_ever"](1, 1, channels[0]), other.synchronize()))
            if other.rank == 0:
                assert "leaves the source memory" in str(error)
            return error

        if comm.rank == 0:
            errors = run_ranks(2, bad)
            assert all(isinstance(error, TriggerError) and error.rank == 0 for error in errors), errors
        all_reduce(comm)

    run_ranks(2, bystander, timeout=TIMEOUT)
    assert daemon.settles(before)


def test_a_ring_full_of_garbage_ends_its_client_alone(daemon: RunningDaemon) -> None:
    def body(comm: Communicator) -> BaseException | None:
        channels_of(comm)
        if comm.rank == 1:
            fifo = comm.proxy.fifo_for(0)
            garbage = np.random.default_rng(7).integers(0, 1 << 63, (fifo.size, 2), np.uint64)
            garbage[:, 1] |= np.uint64(1 << 63)
            ctypes.memmove(fifo.slots_host, garbage.ctypes.data, garbage.nbytes)
        return failure_of(comm)

    errors = run_ranks(2, body)
    assert all(isinstance(error, TriggerError) and error.rank == 1 for error in errors), errors
    assert run_ranks(2, all_reduce) == [3.0] * 2


# The kernel's case runs only with --full, because the collective's case leaves the same state in the daemon.
@pytest.mark.parametrize(
    "scenario", ["killed_in_a_collective:proxy", pytest.param("killed_in_a_kernel", marks=pytest.mark.full)]
)
def test_a_killed_rank_is_cleaned_up_and_its_peers_are_told(daemon: RunningDaemon, scenario: str) -> None:
    before = daemon.resources()
    ended = run_processes(processes(3), PROGRAM, scenario)
    lines = "".join(process.stdout for process in ended).splitlines()
    for rank in range(0, processes(3), 2):
        assert any(line.startswith(f"rank {rank}: PeerLostError peer=1 late=False") for line in lines), lines
    assert daemon.settles(before), (before, daemon.resources())
    assert run_ranks(2, all_reduce) == [3.0] * 2


def test_a_client_that_is_killed_with_a_full_ring_is_cleaned_up(daemon: RunningDaemon, tmp_path: Path) -> None:
    require_devices(2)
    before = daemon.resources()
    program = tmp_path / "flood.py"
    program.write_text(
        "import os, signal, time\n"
        "from proxyccl import Communicator, ThreadBootstrap\n"
        "import threading\n"
        "def rank(bootstrap):\n"
        "    comm = Communicator(bootstrap)\n"
        "    channels = comm.proxy_channels(comm.empty(4096, 'uint8'))\n"
        "    stream = comm.runtime.create_stream()\n"
        f"    comm.compile({KERNELS!r}, 'put_signals')(1, 1, channels[0], 1 << 30, stream=stream)\n"
        "    while comm.proxy.counters(0).puts < 10000: time.sleep(0.001)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "threads = [threading.Thread(target=rank, args=(b,)) for b in ThreadBootstrap.create(2)]\n"
        "[t.start() for t in threads]\n"
        "[t.join() for t in threads]\n"
    )
    assert run_alone(program).returncode == -signal.SIGKILL
    assert daemon.settles(before), (before, daemon.resources())


def test_memory_removed_while_in_use_harms_its_client_alone(daemon: RunningDaemon) -> None:
    """A client may remove memory from which the daemon's worker is copying; the daemon must not unmap it during the
    copy.
    """
    before = daemon.resources()

    def body(comm: Communicator) -> None:
        memory = comm.register(comm.empty(1 << 20, "uint8"))
        channels = comm.proxy_channels(memory)
        barrier(comm)
        stream = comm.runtime.create_stream()
        comm.compile(KERNELS, "put_signals")(1, 1, channels[0], 1 << 30, stream=stream)
        time.sleep(0.05)
        comm.proxy.remove_memory(memory.id, memory.nbytes)
        assert isinstance(failure_of(comm), TriggerError)

    run_ranks(2, body)
    assert daemon.settles(before), (before, daemon.resources())
    assert run_ranks(2, all_reduce) == [3.0] * 2


# -- a daemon that exits, is killed or stops ---


def _wait_while(own_daemon: RunningDaemon, signal_number: int) -> list[BaseException | None]:
    def body(comm: Communicator) -> BaseException | None:
        channels, kernels = channels_of(comm)
        if comm.rank == 0:
            own_daemon.process.send_signal(signal_number)
        started = time.monotonic()
        error = caught(lambda: (kernels["wait_for_ever"](1, 1, channels[0]), comm.synchronize()))
        assert time.monotonic() - started < TIMEOUT / 2
        with pytest.raises(ProxyLostError):
            comm.proxy_channels(comm.empty(4))
        return error

    return run_ranks(2, body)


def test_a_killed_daemon_ends_its_ranks_waits_by_name(own_daemon: RunningDaemon) -> None:
    errors = _wait_while(own_daemon, signal.SIGKILL)
    assert all(isinstance(error, ProxyLostError) for error in errors), errors
    # Only the rank that notices the loss first knows the reason.
    assert any(f"process {own_daemon.process.pid} ended" in str(error) for error in errors), errors


def test_a_killed_daemon_ends_the_waits_of_streams(own_daemon: RunningDaemon) -> None:
    def body(comm: Communicator) -> BaseException | None:
        calls, stream = SpanCalls(comm, 100 * comm.world_size), comm.runtime.create_stream()
        calls.run("all_gather", 100, 1)
        x, out = calls.spans("all_gather", 100, 1, in_place=False)
        comm.all_gather_bytes(b"")
        if comm.rank == 0:
            own_daemon.end(signal.SIGKILL)
        started = time.monotonic()

        def call() -> None:
            for _ in range(5):
                calls.issue("all_gather", x, out, stream=stream)
            comm.synchronize(stream)

        error = caught(call)
        assert time.monotonic() - started < TIMEOUT / 2
        return error

    errors = run_ranks(2, body)
    assert all(isinstance(error, ProxyLostError) for error in errors), errors


# all_gather runs only with --full, because all_reduce's schedule has all kinds of steps that all_gather's has
@pytest.mark.parametrize("collective", [pytest.param("all_gather", marks=pytest.mark.full), "all_reduce"])
def test_a_stopped_daemon_ends_the_waits_of_streams_at_the_time_out(own_daemon: RunningDaemon, collective: str) -> None:
    def body(comm: Communicator) -> BaseException | None:
        x = comm.empty(5000, "float32").fill(1.0)
        out = comm.empty(5000 * comm.world_size, "float32")

        def call() -> None:
            if collective == "all_gather":
                comm.all_gather(x, out=out, algorithm="proxy")
            else:
                comm.all_reduce(x, algorithm="proxy")
            comm.synchronize()

        for _ in range(4):  # prepares the call, so that later calls need no answer from the daemon
            call()
        comm.all_gather_bytes(b"")
        if comm.rank == 0:
            stopped.enter_context(own_daemon.stopped())
        comm.all_gather_bytes(b"")
        started = time.monotonic()
        error = caught(call)
        assert SHORT - 0.1 < time.monotonic() - started < 2 * SHORT
        return error

    with contextlib.ExitStack() as stopped:
        errors = run_ranks(2, body, timeout=SHORT)
    assert all(isinstance(error, ProxyLostError) for error in errors), errors
    reason = f"process {own_daemon.process.pid} has run none of the proxy for 3 s while a stream waited; it is stopped"
    assert any(reason in str(error) for error in errors), errors


WAITS = {
    "flush": lambda comm, kernels, channel: kernels.put_and_flush(1, 1, channel),
    "room in the trigger ring": lambda comm, kernels, channel: kernels.put_signals(1, 1, channel, 500),
    "a signal (ProxyChannel)": lambda comm, kernels, channel: kernels.signal_and_wait(1, 1, channel),
    "a signal, on the CPU": lambda comm, kernels, channel: channel.wait(),
    "a barrier": lambda comm, kernels, channel: comm.all_gather_bytes(b"") if comm.rank else channel.wait(),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_for_a_stopped_daemon_ends_by_its_loss(daemon: RunningDaemon, wait: str) -> None:
    def body(comm: Communicator) -> tuple[BaseException | None, BaseException | None]:
        channels = comm.proxy_channels(comm.empty(256, "uint8"))
        kernels = comm.compile(KERNELS)
        impatient(comm)
        if comm.rank == 0:
            stopped.enter_context(daemon.stopped())
        comm.all_gather_bytes(b"")

        def call() -> None:
            WAITS[wait](comm, kernels, channels[0])
            comm.synchronize()

        error = caught(call)
        failed.wait()  # the daemon stays stopped until both ranks have failed
        stopped.close()
        closing = time.monotonic()
        again = caught(comm.barrier)
        comm.close()
        assert time.monotonic() - closing < TIMEOUT / 2
        return error, again

    failed = threading.Barrier(2)
    with contextlib.ExitStack() as stopped:
        errors = run_ranks(2, body, fifo_size=64)
    assert all(isinstance(error, ProxyLostError) for both in errors for error in both), errors
    assert any(f"process {daemon.process.pid} is stopped" in str(error) for error, _ in errors), errors


def test_a_failure_that_nobody_has_asked_for_is_still_that_of_the_daemon_that_goes_on(daemon: RunningDaemon) -> None:
    def body(comm: Communicator) -> BaseException | None:
        (channel,) = comm.proxy_channels(comm.empty(256, "uint8"), peers=[0])
        stream = comm.runtime.create_stream()
        impatient(comm)
        with daemon.stopped():
            comm.compile(KERNELS, "put_and_flush")(1, 1, channel, stream=stream)
            wait_for(lambda: comm.group.failure.aborted, "the kernel gives up")
            stream.synchronize()
            wait_for(lambda: comm.group.failure._exception is not None, "the watcher has a look")
        return caught(lambda: comm.synchronize(stream))

    (error,) = run_ranks(1, body)
    assert isinstance(error, ProxyLostError), error


def test_requests_to_a_stopped_daemon_end_by_a_time_out_that_was_shortened(daemon: RunningDaemon) -> None:
    def body(comm: Communicator) -> BaseException | None:
        comm.proxy_channels(comm.empty(256, "uint8"), peers=[0])
        impatient(comm)
        memory = comm.empty(256, "uint8")
        with daemon.stopped():
            started = time.monotonic()
            error = caught(lambda: comm.proxy_channels(memory, peers=[0]))
            assert time.monotonic() - started < 8  # seconds, less than the limit of 10 s for an answer
        return error

    (error,) = run_ranks(1, body)
    assert isinstance(error, ProxyLostError), error


def test_a_daemon_that_is_stopped_for_less_than_the_time_out_is_not_lost(own_daemon: RunningDaemon) -> None:
    resumed = threading.Event()

    def body(comm: Communicator) -> float:
        all_reduce(comm)
        comm.all_gather_bytes(b"")
        if comm.rank == 0:
            stopped.enter_context(own_daemon.stopped())
            threading.Timer(1.0, lambda: (stopped.close(), resumed.set())).start()
        comm.all_gather_bytes(b"")
        assert all_reduce(comm) == 3.0
        assert resumed.is_set()
        return all_reduce(comm)

    with contextlib.ExitStack() as stopped:
        assert run_ranks(2, body) == [3.0, 3.0]


def test_closing_waits_one_time_out_for_a_stopped_daemon(own_daemon: RunningDaemon) -> None:
    def body(comm: Communicator) -> None:
        all_reduce(comm)
        comm.all_gather_bytes(b"")
        with own_daemon.stopped():
            started = time.monotonic()
            comm.close()
            assert time.monotonic() - started < 2 * SHORT

    run_ranks(1, body, timeout=SHORT)


def test_a_signal_that_another_thread_gets_ends_the_daemon(own_daemon: RunningDaemon) -> None:
    pid = own_daemon.process.pid

    def others() -> set[int]:
        return {int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()} - {pid}

    wait_for(lambda: bool(others()), "the daemon has another thread")
    assert ctypes.CDLL(None).tgkill(pid, max(others()), int(signal.SIGTERM)) == 0
    own_daemon.wait()
    assert own_daemon.ended == 0


def test_a_daemon_that_is_told_to_end_says_so(own_daemon: RunningDaemon) -> None:
    errors = _wait_while(own_daemon, signal.SIGTERM)
    assert all(isinstance(error, ProxyLostError) for error in errors), errors
    assert any("is ending" in str(error) for error in errors), errors
    own_daemon.wait()
    assert own_daemon.ended == 0
    assert not own_daemon.path.exists()


def test_a_daemon_that_is_told_to_end_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    program, socket = tmp_path / "impatient.py", tmp_path / "socket"
    program.write_text(
        "import os, pathlib, signal, sys\n"
        "from proxyccl.proxy.daemon import command, server\n"
        "class Impatient(server.Daemon):\n"
        "    def __init__(self, *arguments):\n"
        "        super().__init__(*arguments)\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "command.Daemon = Impatient\n"
        "sys.exit(command.run(pathlib.Path(sys.argv[1]), server.DaemonOptions()))\n"
    )
    ended = run_alone(program, str(socket))
    assert ended.returncode == 0, ended.stderr
    assert not socket.exists()


def test_a_daemon_ends_after_what_was_asked_for(own_daemon: RunningDaemon) -> None:
    count = 2000

    def body(comm: Communicator) -> int:
        channels, kernels = channels_of(comm)
        if comm.rank == 0:
            kernels["put_signals"](1, 1, channels[0], count)
            comm.runtime.synchronize()
            own_daemon.process.send_signal(signal.SIGTERM)
        else:
            kernels["take_signals"](1, 1, channels[0], count)
            assert caught(comm.runtime.synchronize) is None
        assert isinstance(failure_of(comm), ProxyLostError)
        return comm.proxy.counters(0).signals

    assert run_ranks(2, body) == [count, 0]


def test_a_restarted_daemon_serves_new_jobs_alone(own_daemon: RunningDaemon) -> None:
    def body(comm: Communicator) -> None:
        all_reduce(comm)
        comm.all_gather_bytes(b"")
        if comm.rank == 0:
            own_daemon.end(signal.SIGKILL)
            with running_daemon(own_daemon.path):
                assert isinstance(caught(lambda: all_reduce(comm)), ProxyLostError)
                assert run_ranks(2, all_reduce) == [3.0] * 2
                assert isinstance(caught(lambda: all_reduce(comm)), ProxyLostError)
        else:
            assert isinstance(failure_of(comm), ProxyLostError)

    run_ranks(2, body)


def test_a_silent_daemon_is_lost_within_the_time_out(own_daemon: RunningDaemon) -> None:
    mappings = own_daemon.mappings()

    def body(comm: Communicator) -> None:
        proxy = comm.proxy
        with own_daemon.stopped():
            assert isinstance(caught(proxy.connect_copy), ProxyLostError)
            assert isinstance(caught(comm.check), ProxyLostError)
            comm.close()
            with pytest.raises(RuntimeUnavailableError, match="has not answered within 3 s; is its process stopped"):
                run_ranks(1, lambda _: None, timeout=SHORT)

    run_ranks(1, body, timeout=SHORT)
    assert own_daemon.settles((own_daemon.descriptors(), mappings, own_daemon.threads()))


def test_a_proxy_that_is_closed_says_so(daemon: RunningDaemon) -> None:
    def body(comm: Communicator) -> Any:
        comm.handler_channel(print)
        return comm.proxy

    (client,) = run_ranks(1, body)
    assert client.close()
    assert not client.drain(1)
    with pytest.raises(ClosedError):
        client.add_handler(print)
    with pytest.raises(ClosedError):
        client.counters(5)
    with pytest.raises(ClosedError):
        client.outstanding(5)
    with pytest.raises(ArgumentError, match="handler"):
        client.add_handler(3)


def test_a_proxy_is_closed_only_when_its_handler_has_returned(daemon: RunningDaemon) -> None:
    """No close() may report success while a handler runs, else the caller would free memory that the handler uses."""
    returns = threading.Event()

    def body(comm: Communicator) -> list[bool]:
        comm.compile(KERNELS, "signal")(1, 1, comm.handler_channel(lambda _: returns.wait(TIMEOUT)))
        wait_for(lambda: comm.proxy.handling, "the handler runs")
        comm.synchronize()  # no kernel may run while the proxy is closed
        closed = [comm.proxy.close(0.01) for _ in range(2)]
        returns.set()
        return [*closed, comm.proxy.close(TIMEOUT)]

    assert run_ranks(1, body) == [[False, False, True]]


# -- programs ---


@pytest.mark.usefixtures("daemon")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_a_program_on_mpi_changes_nothing_but_the_environment(ranks: int) -> None:
    example = EXAMPLES / "custom_kernel.py"
    ended = run_mpi(ranks, example)
    assert ended.returncode == 0, ended.stderr
    assert "OK" in ended.stdout


def test_the_command_says_why_it_can_not_start(daemon: RunningDaemon) -> None:
    second = run_alone("-m", "proxyccl", "daemon", "--socket", str(daemon.path))
    assert second.returncode == 1
    assert "another node daemon listens" in second.stderr
