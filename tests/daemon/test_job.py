"""A job's own daemon: how it starts, how ranks share it, and that it leaves nothing behind when it ends."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxyccl import ArgumentError, Communicator, ProxyLostError, RuntimeUnavailableError, ThreadBootstrap, Trigger
from proxyccl.channels.joining import proxy_place
from proxyccl.channels.joining.proxy_place import Where, Wish, agree, default_place, requested_place
from proxyccl.device.host import HostRuntime
from proxyccl.proxy.daemon import choice, job, server
from proxyccl.proxy.daemon.client import DaemonClient
from proxyccl.proxy.daemon.job import JobDaemon, JobOptions
from proxyccl.proxy.daemon.listeners import HandedOver, abstract, shown
from proxyccl.proxy.daemon.server import Attendance, Daemon
from proxyccl.proxy.observe import publications
from proxyccl.proxy.processes import start_of
from support.daemons import daemon_inside, forget_daemon
from support.device_arrays import on_device, on_host
from support.devices import rank_runtime, require_devices
from support.fakes.staging import seen_as
from support.paths import PROGRAMS
from support.processes import run_processes, shared_memory_names
from support.running import TIMEOUT, run_alone, run_mpi, run_ranks, wait_for

KERNELS = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void put(DeviceHandle<ProxyChannel> channel, uint64_t bytes) {
  channel.putWithSignalAndFlush(0, 0, bytes);
}
extern "C" __global__ void put_to(DeviceHandle<ProxyChannel> channel, uint32_t destination, uint64_t bytes) {
  channel.putWithSignal(destination, 0, channel.src_memory, 0, bytes);
  channel.flush();
}
extern "C" __global__ void take(DeviceHandle<ProxyChannel> channel) { channel.wait(); }
extern "C" __global__ void flush(ProxyChannelDeviceHandle channel) { channel.flush(); }
"""
OPTIONS = JobOptions(1, None, sorted(os.sched_getaffinity(0)), 1)


@pytest.fixture(autouse=True)
def _fresh_name(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_daemon(monkeypatch)


def all_reduce(comm: Communicator) -> float:
    x = on_device(comm, np.full(1000, comm.rank + 1.0, np.float32))
    comm.all_reduce(x, algorithm="proxy")
    comm.synchronize()
    return float(on_host(x)[999])


def daemon_of(comm: Communicator) -> int:
    assert isinstance(comm.proxy, DaemonClient)
    return comm.proxy.daemon


def wait_for_end(pid: int) -> None:
    wait_for(lambda: start_of(pid) is None, f"process {pid} ends")


# -- the daemon's start, its sharing by ranks, and its exit ---


def test_the_ranks_start_it_and_the_last_to_leave_ends_it() -> None:
    def body(comm: Communicator) -> tuple[float, int, str]:
        return all_reduce(comm), daemon_of(comm), str(comm.proxy)

    results = run_ranks(2, body, proxy="process")
    assert [result[0] for result in results] == [3.0] * 2
    (daemon,) = {result[1] for result in results}
    assert daemon != os.getpid()
    name = results[0][2].partition("@")[2].partition(",")[0]
    assert name.startswith("proxyccl-")
    wait_for_end(daemon)
    assert name not in Path("/proc/net/unix").read_text()
    assert daemon not in [publication.pid for _, publication in publications.find()]


def test_a_job_of_processes_says_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import numpy as np\n"
        "from proxyccl import Communicator\n"
        "with Communicator() as comm:\n"
        "    x = comm.empty(100)\n"
        "    comm.all_reduce(x, algorithm='proxy')\n"
        "    comm.synchronize()\n"
        "    pids = comm.all_gather_bytes(str(comm.proxy.daemon).encode())\n"
        "if comm.rank == 0: print(*{int(pid) for pid in pids})\n"
    )
    before = shared_memory_names()
    started = run_mpi(2, program, env={"PROXYCCL_PROXY": "process"})
    assert started.returncode == 0, started.stderr
    assert started.stderr == ""
    wait_for_end(int(started.stdout))
    assert shared_memory_names() <= before


def test_later_communicators_and_groups_use_the_same() -> None:
    halves = [ThreadBootstrap.create(2) for _ in range(2)]

    def body(comm: Communicator) -> set[int]:
        found = {daemon_of(comm)}
        for _ in range(2):
            half = halves[comm.rank // 2][comm.rank % 2]
            with Communicator(half, comm.runtime, proxy="process", timeout=TIMEOUT) as group:
                found.add(daemon_of(group))
                assert all_reduce(group) == 3.0
        return found

    assert len(set.union(*run_ranks(4, body, proxy="process"))) == 1


def test_its_devices_have_their_usual_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the ranks' process, CUDA may be limited to one queue, to order its kernels; the daemon must not inherit this
    limit.
    """

    def environment(comm: Communicator) -> set[str]:
        return set(Path(f"/proc/{daemon_of(comm)}/environ").read_text().split("\0"))

    wait_for_end(run_ranks(1, daemon_of, proxy="process")[0])
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_MAX_COPY_CONNECTIONS", "OTHER"):
        monkeypatch.setenv(name, "1")
    (kept,) = run_ranks(1, environment, proxy="process")
    assert "OTHER=1" in kept
    assert not [entry for entry in kept if entry.startswith("CUDA_DEVICE_MAX")]


def test_it_waits_a_while_for_the_next_communicator() -> None:
    first = run_ranks(2, daemon_of, proxy="process")
    assert run_ranks(2, daemon_of, proxy="process") == first
    wait_for_end(first[0])
    (second,) = set(run_ranks(2, daemon_of, proxy="process"))
    assert second != first[0]


def test_ranks_that_were_asked_for_a_place_keep_it() -> None:
    require_devices(2)
    bootstraps = ThreadBootstrap.create(2)
    found: list[Any] = [None, None]

    def rank(number: int, place: str) -> None:
        with Communicator(bootstraps[number], rank_runtime(number), proxy=place, timeout=TIMEOUT) as comm:
            found[number] = all_reduce(comm), isinstance(comm.proxy, DaemonClient)

    threads = [threading.Thread(target=rank, args=item) for item in enumerate(("thread", "process"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(3.0, False), (3.0, True)]


def test_observers_find_it_by_its_process_and_by_the_job() -> None:
    def body(comm: Communicator) -> None:
        daemon = daemon_of(comm)
        comm.all_gather_bytes(b"")
        for found in (publications.find(process=daemon), publications.find(comm.job)):
            assert [publication.description.rank for _, publication in found] == [0, 1]
            assert {publication.pid for _, publication in found} == {daemon}
        comm.all_gather_bytes(b"")

    run_ranks(2, body, proxy="process")


# -- connections that are not used yet ---


def prepared(comm: Communicator) -> Any:
    early = comm.group.links._daemon._early
    assert early is not None
    made = early.result(TIMEOUT)
    assert comm.proxy_if_started is None
    return made


def started(comm: Communicator) -> int:
    """Waits until a communicator has prepared its connection to the daemon. Returns the daemon's process id."""
    return int(prepared(comm).process)


def test_the_ranks_start_it_before_they_use_it() -> None:
    def body(comm: Communicator) -> set[int]:
        early = started(comm)
        comm.all_gather_bytes(b"")
        assert all_reduce(comm) == 3.0
        return {early, daemon_of(comm)}

    assert len(set.union(*run_ranks(2, body, proxy="process", cta_policy="zero"))) == 1


def test_one_that_nobody_used_ends_with_the_communicator() -> None:
    (daemon,) = set(run_ranks(2, started, proxy="process", cta_policy="zero"))
    wait_for_end(daemon)


def test_a_communicator_that_is_closed_at_once_waits_for_nothing_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = threading.Event()
    launch = job._launch

    def slow(listener: socket.socket, options: JobOptions, timeout: float) -> None:
        assert closed.wait(TIMEOUT)
        launch(listener, options, timeout)

    monkeypatch.setattr(job, "_launch", slow)
    (name,) = set(run_ranks(2, lambda comm: comm.group.links.place.job_daemon, proxy="process", cta_policy="zero"))
    closed.set()
    wait_for(lambda: name in job._served, "the rank that starts it is served")
    wait_for_end(job._served[name][0])


def test_one_that_is_lost_before_its_first_use_is_started_again() -> None:
    def body(comm: Communicator) -> set[int]:
        early = started(comm)
        comm.all_gather_bytes(b"")
        if comm.rank == 0:
            os.kill(early, signal.SIGKILL)
        wait_for(lambda: prepared(comm).is_lost, "its connection ends")
        assert all_reduce(comm) == 3.0
        return {early, daemon_of(comm)}

    assert len(set.union(*run_ranks(2, body, proxy="process", cta_policy="zero"))) == 2


def test_one_whose_starter_has_ended_waits_for_nobody() -> None:
    assert Attendance(os.getpid()).milliseconds_left(clients=0)
    child = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})
    waiting = Attendance(child)
    (descriptor,) = waiting.descriptors
    os.waitid(os.P_PIDFD, descriptor, os.WEXITED)
    assert waiting.ended(descriptor) == child
    assert waiting.milliseconds_left(clients=0) == 0


@pytest.mark.host_only(reason="a driver's answer is given here")
def test_a_thread_beside_kernels_that_are_loaded_lazily_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostRuntime, "loads_lazily", True)
    with pytest.warns(RuntimeWarning, match="CUDA_MODULE_LOADING=EAGER"):
        run_ranks(1, lambda comm: comm.proxy, proxy="thread")


@pytest.mark.host_only(reason="a driver's answer is given here")
def test_a_thread_beside_few_queues_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostRuntime, "queue_limit", "CUDA_DEVICE_MAX_CONNECTIONS=1")
    with pytest.warns(RuntimeWarning, match="with CUDA_DEVICE_MAX_CONNECTIONS=1 the copies"):
        run_ranks(1, lambda comm: comm.proxy, proxy="thread")


# -- failures ---


@pytest.mark.parametrize("scenario", ["alone", "with_a_child"])
def test_a_killed_starter_does_not_end_it_for_others_nor_keep_it(scenario: str) -> None:
    before = shared_memory_names()
    killed, other = run_processes(2, PROGRAMS / "job_daemon.py", scenario)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert other.returncode == 0, other.stderr
    assert killed.stderr == ""
    lines = [line.split() for line in (killed.stdout + other.stdout).splitlines()]
    (daemon,) = {int(pid) for what, pid in lines if what == "daemon"}
    children = [int(pid) for what, pid in lines if what == "child"]
    try:
        wait_for_end(daemon)
        assert all(start_of(child) is not None for child in children)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
    assert shared_memory_names() <= before


def test_a_killed_one_is_told_by_name_and_another_is_started() -> None:
    def body(comm: Communicator) -> int:
        all_reduce(comm)
        daemon = daemon_of(comm)
        comm.all_gather_bytes(b"")
        if comm.rank == 0:
            os.kill(daemon, signal.SIGKILL)

        def is_lost() -> bool:
            try:
                comm.check()
            except ProxyLostError as error:
                return "node daemon" in str(error)
            return False

        wait_for(is_lost, "the daemon is lost")
        return daemon

    (killed,) = set(run_ranks(2, body, proxy="process"))
    assert killed not in run_ranks(2, daemon_of, proxy="process")


def test_its_last_words_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = JobDaemon("proxyccl-unused", OPTIONS)
    assert daemon.last_words() == ""
    errors = os.memfd_create("errors")
    os.write(errors, b"Traceback\nMemoryError: no room\n")
    monkeypatch.setattr(daemon, "_errors", errors)
    assert daemon.last_words() == "MemoryError: no room"
    daemon.close()
    assert daemon.last_words() == ""


def test_a_failed_start_tells_why_and_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    way_out = "PROXYCCL_PROXY=thread"
    with pytest.raises(RuntimeUnavailableError, match=rf"cores: a thread can't run on \[4000\].*; {way_out}"):
        run_ranks(2, daemon_of, proxy="process", proxy_cores="4000")

    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no module named proxyccl >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(RuntimeUnavailableError, match=f"status 3: no module named proxyccl; {way_out}"):
        run_ranks(1, daemon_of, proxy="process")
    broken.write_text("#!/bin/sh\nsleep 60\n")
    monkeypatch.setattr(job, "_START_SECONDS", 0.5)
    with pytest.raises(RuntimeUnavailableError, match=f"did not start within 0.5 s; {way_out}"):
        run_ranks(1, daemon_of, proxy="process", timeout=0.5)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    with pytest.raises(RuntimeUnavailableError, match=f"cannot start .*nowhere.*; {way_out}"):
        run_ranks(1, daemon_of, proxy="process")
    monkeypatch.setattr(sys, "executable", "")
    with pytest.raises(RuntimeUnavailableError, match=f"interpreter .*; {way_out}"):
        run_ranks(1, daemon_of, proxy="process")


def test_one_that_is_silent_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "_START_SECONDS", 0.2)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind(abstract("proxyccl-silent"))
        with pytest.raises(
            RuntimeUnavailableError, match=r"none answered within 0\.2 s"
        ):  # nothing listens on the socket
            JobDaemon("proxyccl-silent", OPTIONS).connect(0.2)
        silent.listen(1)
        with pytest.raises(RuntimeUnavailableError, match="PROXYCCL_PROXY=thread"):
            JobDaemon("proxyccl-silent", OPTIONS).connect(0.2)


def serving(name: str) -> tuple[Daemon, threading.Thread]:
    """Runs a job's own daemon in a thread of this process. Returns the daemon and the thread."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(abstract(name))
    listener.listen()
    daemon = Daemon(HandedOver(listener.detach()), attendance=Attendance(os.getpid()))
    thread = threading.Thread(target=daemon.serve)
    thread.start()
    return daemon, thread


def test_one_to_which_nobody_comes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "START_SECONDS", 0.1)
    daemon, thread = serving("proxyccl-lonely")
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    daemon.close()


def test_a_client_that_comes_while_it_ends_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []

    def launch(listener: socket.socket, options: JobOptions, timeout: float) -> None:
        another = Daemon(HandedOver(os.dup(listener.fileno())), attendance=Attendance(os.getpid()))
        started.append(threading.Thread(target=lambda: (another.serve(), another.close())))
        started[0].start()

    monkeypatch.setattr(job, "_launch", launch)
    monkeypatch.setattr(server, "START_SECONDS", 0.05)
    ending, thread = serving("proxyccl-ending")
    thread.join(TIMEOUT)  # the daemon has stopped accepting connections, but its socket still listens
    waiting = threading.Timer(0.2, ending.close)
    waiting.start()
    address = JobDaemon("proxyccl-ending", OPTIONS)
    connection, pid = address.connect(10)
    assert pid == os.getpid()
    assert len(started) == 1
    connection.close()
    address.close()
    waiting.join()
    started[0].join(TIMEOUT)
    assert not started[0].is_alive()


def test_a_rank_whose_device_no_daemon_sees_starts_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refused: list[str] = []

    def confined(connection: socket.socket, *_: object) -> None:
        address = shown(connection.getpeername())
        if rank_runtime(0).device_id not in address:
            refused.append(address)
            raise ArgumentError("device", "the node daemon does not see it")

    monkeypatch.setattr(choice, "prepare_device", confined)
    (name,) = run_ranks(1, lambda comm: str(comm.proxy), proxy="process")
    assert f"{refused.pop()}-{rank_runtime(0).device_id}," in name
    assert not refused

    monkeypatch.setenv("PROXYCCL_DAEMON_SOCKET", str(tmp_path / "socket"))
    with daemon_inside(tmp_path / "socket"):
        with pytest.raises(ArgumentError, match="device"):
            run_ranks(1, lambda comm: comm.proxy, proxy="daemon")
        refused.clear()
        monkeypatch.delenv("PROXYCCL_PROXY", raising=False)
        monkeypatch.setattr(proxy_place, "default_place", lambda runtime: "daemon")
        (name,) = run_ranks(1, lambda comm: str(comm.proxy))
        assert refused[0] == str(tmp_path / "socket")
        assert f"{refused[1]}-{rank_runtime(0).device_id}," in name


# -- work that only the rank's own process can do ---


def test_handlers_run_in_the_rank() -> None:
    def body(comm: Communicator) -> None:
        seen: list[Trigger] = []
        assert all_reduce(comm) == 3.0
        channel = comm.handler_channel(seen.append)
        comm.compile(KERNELS, "flush")(1, 1, channel)
        comm.synchronize()
        assert [trigger.channel for trigger in seen] == [channel.id]
        assert all_reduce(comm) == 3.0

    run_ranks(2, body, proxy="process")


@pytest.mark.host_only(reason="a GPU's memory is shared whoever allocated it")
def test_memory_of_this_process_alone_is_the_source_of_puts() -> None:
    count = 1000

    def body(comm: Communicator) -> None:
        assert all_reduce(comm) == 3.0
        landing = comm.empty(count, "float32")
        private = np.full(count, comm.rank + 1.0, np.float32)
        channels = [comm.proxy_channels(landing, private)[0], comm.proxy_channels(landing)[0]]
        kernels = comm.compile(KERNELS)
        for channel in channels:
            kernels["put"](1, 1, channel, 4 * count)
            kernels["take"](1, 1, channel)
            comm.synchronize()
            assert (channel.counters.puts, comm.proxy.outstanding(channel.id)) == (1, 0)
            if channel is channels[0]:
                assert np.array_equal(on_host(landing), np.full(count, 2.0 - comm.rank))
            comm.all_gather_bytes(b"")  # the peers have checked their data before the next put overwrites it
        assert channels[0].id != channels[1].id
        assert comm.proxy.fifo_for(channels[0].id) is not comm.proxy.fifo_for(channels[1].id)
        assert all_reduce(comm) == 3.0

    run_ranks(2, body, proxy="process")


@pytest.mark.host_only(reason="a GPU's memory is shared whoever allocated it")
def test_memory_of_this_process_alone_is_put_to_pinned_memory() -> None:
    def body(comm: Communicator) -> None:
        inboxes = [comm.runtime.allocate_pinned(1000) for _ in range(2)]
        handles = comm.all_gather_bytes(b"".join(inbox.handle for inbox in inboxes))[1 - comm.rank]
        size = len(handles) // 2
        theirs = [comm.runtime.open_pinned(handles[i * size : (i + 1) * size]) for i in range(2)]
        ids = [comm.proxy.add_pinned_memory(theirs[0])]
        channel = comm.proxy_channels(comm.empty(16), np.full(1000, comm.rank + 1, np.uint8))[0]
        ids.append(comm.proxy.add_pinned_memory(theirs[1]))
        kernels = comm.compile(KERNELS)
        for first, inbox in zip(ids, inboxes, strict=True):
            kernels["put_to"](1, 1, channel, first, 1000)
            kernels["take"](1, 1, channel)
            comm.synchronize()
            assert (seen_as(inbox, np.uint8) == 2 - comm.rank).all()
        comm.all_gather_bytes(b"")
        for first, memory in zip(ids, theirs, strict=True):
            comm.proxy.remove_memory(first, memory.nbytes)

    run_ranks(2, body, proxy="process")


# -- where the proxy runs ---


def wish(where: Where | None, default: Where, name: str = "", host: str = "here") -> Wish:
    return Wish(host, where, default, name)


def test_ranks_of_a_host_share_one_choice() -> None:
    def places(*wishes: Wish) -> list[tuple[str, str, bool]]:
        return [
            (place.where, place.job_daemon, place.chosen) for place in (agree(wishes, r) for r in range(len(wishes)))
        ]

    assert places(wish(None, "daemon", "a"), wish(None, "daemon", "b")) == [("daemon", "a", False)] * 2
    assert places(wish(None, "daemon", "a"), wish(None, "process", "b")) == [("process", "a", False)] * 2
    assert places(wish("thread", "thread", "a"), wish(None, "daemon", "b")) == [
        ("thread", "a", True),
        ("daemon", "a", False),
    ]
    assert places(wish(None, "process", "a"), wish(None, "daemon", "b", "there")) == [
        ("process", "a", False),
        ("daemon", "b", False),
    ]


def test_the_default_is_a_process_on_gpus_and_a_thread_on_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PROXYCCL_DAEMON_SOCKET", str(tmp_path / "socket"))
    assert [default_place(runtime) for runtime in ("host", "cuda", "hip")] == ["thread", "process", "process"]
    with daemon_inside(tmp_path / "socket"):
        assert [default_place(runtime) for runtime in ("host", "cuda", "hip")] == ["thread", "daemon", "daemon"]


def test_an_argument_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROXYCCL_PROXY", raising=False)
    assert requested_place(None) is None
    monkeypatch.setenv("PROXYCCL_PROXY", "daemon")
    assert [requested_place(argument) for argument in (None, "thread", "process")] == ["daemon", "thread", "process"]


def test_info_shows_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_PROXY", "process")
    shown = run_alone("-m", "proxyccl", "info").stdout
    assert "process (PROXYCCL_PROXY)" in shown
