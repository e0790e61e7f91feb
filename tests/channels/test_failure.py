"""Each failure ends, within the time-out, in a named exception on every living rank; nothing hangs or is left
behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import re
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from proxyccl import (
    AbortedError,
    ArgumentError,
    ClosedError,
    Communicator,
    ContextLostError,
    HandlerError,
    KernelError,
    MismatchError,
    ResourceError,
    Runtime,
    ThreadBootstrap,
    TransportError,
    Trigger,
    TriggerError,
    WaitTimeoutError,
)
from proxyccl.channels.liveness.watcher import WatchThread
from proxyccl.channels.segment.control import create_segment
from proxyccl.channels.segment.error_record import ErrorRecord
from proxyccl.device._native import lib as native
from proxyccl.device.errors import DriverError
from proxyccl.device.process import threads
from proxyccl.device.runtimes import open_runtime
from support import hanging
from support.device_arrays import barrier, on_device, on_host
from support.devices import processes, rank_runtime
from support.paths import PROGRAMS
from support.processes import Ended, is_job_daemon, processes_with, run_processes, shared_memory_names
from support.ranks import Gate, Ranks, settled, settles
from support.running import SHORT, TIMEOUT, impatient, run_mpi, run_ranks, wait_for

pytestmark = [pytest.mark.daemon, pytest.mark.hip]
NO_PROXY = pytest.mark.no_proxy

PROGRAM = PROGRAMS / "failure.py"
VICTIM = 1
PROCESSES = processes(3)
SURVIVORS = [rank for rank in range(PROCESSES) if rank != VICTIM]


caught = functools.partial(hanging.caught, within=TIMEOUT / 2)  # the failure must end the wait before the time-out does


def ones(comm: Communicator) -> Any:
    return on_device(comm, np.ones(4, np.float32))


def meet(comm: Communicator) -> None:
    """Waits until all ranks are ready, so that no rank fails before another one is ready."""
    comm.all_gather_bytes(b"")


# -- processes ---


@pytest.fixture
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checks that no process and no name in /dev/shm outlives the test that made it. A job's own daemon may exit a
    little later than the job's ranks.
    """
    mark = str(uuid.uuid4())
    monkeypatch.setenv("STARTED_BY_TEST", mark)
    before = shared_memory_names()
    yield
    wait_for(lambda: not any(map(is_job_daemon, processes_with("STARTED_BY_TEST", mark))), "the daemon has ended")
    assert shared_memory_names() <= before
    assert not processes_with("STARTED_BY_TEST", mark)


def outcomes(ended: list[Ended]) -> dict[int, list[str]]:
    """Returns each rank's printed lines."""
    assert all(process.returncode in (0, -9) for process in ended), "\n".join(process.stderr for process in ended)
    lines = "".join(process.stdout for process in ended).splitlines()
    assert not any("late=True" in line for line in lines), lines
    return {
        rank: [line.split(": ", 1)[1] for line in lines if line.startswith(f"rank {rank}: ")]
        for rank in range(len(ended))
    }


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    "scenario",
    [
        *(
            pytest.param(f"killed_in_a_collective:{name}", marks=[NO_PROXY, pytest.mark.hip_full, pytest.mark.full])
            for name in ("one_shot", "ring")
        ),
        pytest.param("killed_in_a_collective:two_shot", marks=NO_PROXY),
        *(
            pytest.param(scenario, marks=pytest.mark.hip_full)
            for scenario in (
                "killed_in_a_collective:proxy",
                "killed_in_a_dispatch",
                "killed_before_a_registration",
                "killed_before_it_is_mapped:semaphores",
            )
        ),
        pytest.param("killed_in_a_kernel", marks=[NO_PROXY, pytest.mark.hip_full]),
        "killed_before_it_is_mapped:schedules",
    ],
)
def test_a_killed_rank_is_named_on_the_others(scenario: str) -> None:
    printed = outcomes(run_processes(PROCESSES, PROGRAM, scenario))
    assert not printed[VICTIM]
    for rank in SURVIVORS:
        assert printed[rank], scenario
        for line in printed[rank]:
            assert line.startswith(f"PeerLostError peer={VICTIM}")


@NO_PROXY
@pytest.mark.usefixtures("nothing_left")
def test_a_rank_killed_in_the_bootstrap_runs_into_the_time_out() -> None:
    """A rank that is killed before it announces its process id is not watched, so the other ranks time out."""
    printed = outcomes(run_processes(PROCESSES, PROGRAM, "killed_before_the_communicator"))
    for rank in SURVIVORS:
        assert printed[rank][0].startswith(f"WaitTimeoutError peer={VICTIM}")


@pytest.mark.usefixtures("nothing_left")
def test_close_does_not_wait_for_a_killed_rank() -> None:
    printed = outcomes(run_processes(PROCESSES, PROGRAM, "killed_before_close"))
    for rank in SURVIVORS:
        assert printed[rank][-1].endswith("closed>")


@pytest.mark.hip_full
@pytest.mark.usefixtures("nothing_left")
def test_a_stopped_rank_times_out_and_hears_of_it_later() -> None:
    printed = outcomes(run_processes(PROCESSES, PROGRAM, "stopped"))
    assert all(lines[0].startswith(f"WaitTimeoutError peer={VICTIM}") for lines in printed.values())


@pytest.mark.usefixtures("nothing_left")
def test_a_handler_that_raises_ends_every_rank() -> None:
    printed = outcomes(run_processes(PROCESSES, PROGRAM, "raising_handler"))
    assert all(lines[0].startswith("HandlerError") for lines in printed.values())
    assert printed[VICTIM][1] == "cause LookupError('no such expert')"


@NO_PROXY
@pytest.mark.usefixtures("nothing_left")
def test_an_exception_inside_with_releases_the_others() -> None:
    printed = outcomes(run_processes(PROCESSES, PROGRAM, "exception_inside_with"))
    assert printed.pop(VICTIM) == ["ValueError"]
    assert all(lines[0].startswith("AbortedError") for lines in printed.values()), printed


@pytest.mark.usefixtures("nothing_left")
def test_a_rank_that_leaves_without_close_releases_the_others() -> None:
    printed = outcomes(run_processes(PROCESSES, PROGRAM, "exit_of_one_rank"))
    for rank in SURVIVORS:
        assert re.match(rf"(PeerLostError|MismatchError) .*rank {VICTIM}", printed[rank][0])


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    "launcher", [pytest.param("mpi", marks=[NO_PROXY, pytest.mark.hip_full, pytest.mark.full]), "processes"]
)
def test_exit_without_close_is_clean(launcher: str) -> None:
    if launcher == "mpi":
        result = run_mpi(PROCESSES, PROGRAM, "exit_without_close")
        ended = [Ended(result.returncode, result.stdout, result.stderr)]
    else:
        ended = run_processes(PROCESSES, PROGRAM, "exit_without_close")
    assert [process.returncode for process in ended] == [0] * len(ended), ended
    assert sum(process.stdout.count("leaves") for process in ended) == PROCESSES
    assert not any(process.stderr for process in ended), ended


@pytest.mark.full
@NO_PROXY
@pytest.mark.hip_full
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("scenario", ["killed_in_a_collective:two_shot", "killed_before_the_communicator"])
def test_a_killed_rank_ends_an_mpi_job(scenario: str) -> None:
    """MPI's launcher ends the remaining ranks, whatever exceptions they have caught."""
    assert run_mpi(PROCESSES, PROGRAM, scenario, timeout=TIMEOUT).returncode != 0


# -- a rank that has failed tells the others ---

GIVE_UP = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void give_up(DeviceHandle<SmChannel>* channels) {
  channels[0].wait();
  channels[0].signal();
}
extern "C" __global__ void hear(DeviceHandle<SmChannel>* channels) { channels[0].wait(); }
"""


@NO_PROXY
def test_what_a_kernel_sends_after_a_time_out_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 0's kernel announces the time-out, because rank 0's CPU and the watchers do not look for failures."""
    monkeypatch.setattr(WatchThread, "INTERVAL_MS", 60_000)
    checked = threading.Event()

    def body(comm: Communicator) -> BaseException | None:
        channels = comm.sm_channels(comm.empty(4))
        kernels = comm.compile(GIVE_UP)
        impatient(comm)
        if comm.rank == 0:
            kernels.give_up(1, 1, channels)
            comm.runtime.synchronize()
            checked.wait(TIMEOUT)
            return caught(comm.check)
        time.sleep(SHORT / 2)  # lets rank 0 time out before rank 1
        kernels.hear(1, 1, channels)
        error = caught(comm.synchronize)
        checked.set()
        return error

    errors = run_ranks(2, body)
    assert all(isinstance(error, WaitTimeoutError) and error.rank == 0 for error in errors), errors


@NO_PROXY
def test_a_rank_keeps_the_first_error_record_it_was_told() -> None:
    segments = [create_segment(open_runtime("host"), rank, TIMEOUT, world_size=3) for rank in range(3)]
    for rank, segment in enumerate(segments):
        segment.introduce({peer: other for peer, other in enumerate(segments) if peer != rank})
    records = [ErrorRecord(native.PROXYCCL_ERROR_TIMEOUT, rank, peer=1, expected=7, seen=rank) for rank in range(3)]
    segments[0].raise_abort(records[0])
    assert all(segment.aborted for segment in segments)
    segments[2].raise_abort(records[2])
    assert [segment.record() for segment in segments] == [records[0], records[0], records[2]]


# -- triggers that are refused ---

PUSH = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void put(DeviceHandle<ProxyChannel>* channels, unsigned dst, unsigned long dst_offset,
                               unsigned src, unsigned long src_offset, unsigned long bytes) {
  channels[0].put(dst, dst_offset, src, src_offset, bytes);
  channels[0].flush();
}
extern "C" __global__ void use_channel(DeviceHandle<ProxyChannel>* channels, int id) {
  DeviceHandle<ProxyChannel> other = channels[0];
  other.channel = id;
  other.signal();
  other.flush();
}
extern "C" __global__ void wait(DeviceHandle<ProxyChannel>* channels) { channels[0].wait(); }
extern "C" __global__ void packets(DeviceHandle<SmChannel>* channels, unsigned flag) {
  channels[0].putPackets(0, 0, 8, threadIdx.x, blockDim.x, flag);
}
extern "C" __global__ void custom(ProxyChannelDeviceHandle channel, int times) {
  for (int i = 0; i < times; ++i) channel.custom(threadIdx.x, i);
  channel.flush();
}
extern "C" __global__ void half_a_barrier() {
  if (threadIdx.x == 0) return;
  if (threadIdx.x == 1) __syncwarp(3);
  __syncthreads();
  if (threadIdx.x == 2) __shfl_sync(8, 1, 0);
}
"""
SIZE = 4096


def refused(arguments: Callable[[int, int], tuple[int, int, int, int, int]]) -> list[BaseException | None]:
    """Lets rank 0 call `put` with the result of `arguments(destination id, source id)` while rank 1 waits for a signal.
    Returns the errors of both ranks.
    """

    def body(comm: Communicator) -> BaseException | None:
        buffer = comm.empty(SIZE, "uint8").fill(comm.rank)
        memory = comm.register(buffer)
        channels = comm.proxy_channels(memory)
        kernels = comm.compile(PUSH)
        meet(comm)
        if comm.rank == 0:
            kernels.put(1, 1, channels, *arguments(memory.peer_id(1), memory.id))
        else:
            kernels.wait(1, 1, channels)
        error = caught(comm.synchronize)
        assert (buffer.numpy() == comm.rank).all()
        return error

    return run_ranks(2, body)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (lambda dst, src: (dst, SIZE - 8, src, 0, 16), "leaves the destination"),
        (lambda dst, src: (dst, 0, src, SIZE - 8, 16), "leaves the source"),
        (lambda dst, src: (dst, SIZE + 1, src, 0, 0), "leaves the destination"),
        (lambda dst, src: (dst, 0, src, 0, SIZE + 1), "leaves the source"),
        (lambda dst, src: (dst, 0, src, 0, (1 << 32) - 1), "leaves the source"),
        (lambda dst, src: (dst, 1 << 32, src, 0, 16), f"leaves the peer's memory of {SIZE} bytes"),
        (lambda dst, src: (dst, 0, src, 1 << 32, 16), f"leaves the local memory of {SIZE} bytes"),
        (lambda dst, src: (dst, 0, src, (1 << 64) - 8, 16), f"leaves the local memory of {SIZE} bytes"),
        (lambda dst, src: (dst, SIZE, src, 0, 1 << 40), f"leaves the peer's memory of {SIZE} bytes"),
        (lambda dst, src: (508, 0, src, 0, 16), "the peer's memory (memory id 508, which is not registered)"),
        (lambda dst, src: (dst, 0, 1 << 20, 0, 16), "the local memory (memory id 1048576, which is not registered)"),
        (lambda dst, src: (500, 0, src, 0, 16), "destination memory id is not registered"),
        (lambda dst, src: (dst, 0, 507, 0, 16), "source memory id is not registered"),
    ],
)
def test_a_put_outside_registered_memory_moves_nothing(
    arguments: Callable[[int, int], tuple[int, int, int, int, int]], reason: str
) -> None:
    errors = refused(arguments)
    assert all(isinstance(error, TriggerError) for error in errors), errors
    assert reason in str(errors[0])
    assert {error.rank for error in errors if isinstance(error, TriggerError)} == {0}


@pytest.mark.parametrize("end", ["source", "destination"])
def test_memory_that_remote_links_alone_know_is_not_copied(end: str) -> None:
    def body(comm: Communicator) -> BaseException | None:
        memory = comm.register(comm.empty(SIZE, "uint8"))
        channels, kernels = comm.proxy_channels(memory), comm.compile(PUSH)
        remote = comm.proxy.add_remote_memory(4096, SIZE, [17])  # 4096 is not an address of this process
        ends = (memory.peer_id(1 - comm.rank), remote) if end == "source" else (remote, memory.id)
        meet(comm)
        if comm.rank == 0:
            kernels.put(1, 1, channels, ends[0], 0, ends[1], 0, 16)
        else:
            kernels.wait(1, 1, channels)
        return caught(comm.synchronize)

    errors = run_ranks(2, body)
    assert all(isinstance(error, TriggerError) for error in errors), errors
    assert "only a remote link reaches a memory that the trigger names" in str(errors[0])


def test_the_error_of_a_refused_put_says_what_it_was() -> None:
    error = refused(lambda dst, src: (dst, SIZE - 8, src, 0, 16))[1]
    assert isinstance(error, TriggerError)
    assert (error.rank, error.operation, error.offset) == (0, "data", SIZE - 8)
    assert error.channel is not None
    assert f"data of 16 bytes at offset {SIZE - 8} to rank 1" in str(error)


def test_the_rank_of_a_refused_put_hears_how_large_both_memories_are() -> None:
    text = str(refused(lambda dst, src: (dst, SIZE - 8, src, 0, 16))[0])
    assert re.search(rf"destination memory \(source: memory id \d+ of {SIZE} bytes, offset 0; ", text)
    assert re.search(rf"; destination: memory id \d+ of {SIZE} bytes, offset {SIZE - 8}\)", text)


def test_a_trigger_for_a_channel_that_is_not_in_use_is_refused() -> None:
    def body(comm: Communicator) -> BaseException | None:
        channels = comm.proxy_channels(comm.empty(16))
        kernels = comm.compile(PUSH)
        meet(comm)
        if comm.rank == 0:
            kernels.use_channel(1, 1, channels, 1023)
        else:
            kernels.wait(1, 1, channels)
        return caught(comm.synchronize)

    errors = run_ranks(2, body)
    assert all(isinstance(error, TriggerError) and error.channel == 1023 for error in errors), errors


SM_ACCESSES = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
using Sm = DeviceHandle<SmChannel>;
extern "C" __global__ void put(Sm channel, unsigned long to, unsigned long from, unsigned long bytes) {
  channel.put(to, from, bytes, threadIdx.x, blockDim.x);
}
extern "C" __global__ void get(Sm channel, unsigned long to, unsigned long from, unsigned long bytes) {
  channel.get(to, from, bytes, threadIdx.x, blockDim.x);
}
extern "C" __global__ void putPackets(Sm channel, unsigned long to, unsigned long from, unsigned long bytes) {
  channel.putPackets(to, from, bytes, threadIdx.x, blockDim.x, 7);
}
extern "C" __global__ void getPackets(Sm channel, unsigned long from, unsigned long to, unsigned long bytes) {
  channel.getPackets<LL8Packet>(from, to, bytes, threadIdx.x, blockDim.x, 7);
}
"""


@NO_PROXY
@pytest.mark.parametrize(
    ("call", "first", "second", "nbytes", "reason"),
    [  # The peer's memory has 1024 bytes, this rank's memory 512 bytes, and the packet buffer 256 bytes.
        ("put", 1024 - 8, 0, 16, "16 bytes at offset 1016 leave the peer's memory of 1024 bytes"),
        ("put", 0, 512 - 8, 16, "16 bytes at offset 504 leave the local memory of 512 bytes"),
        ("put", (1 << 64) - 8, 0, 16, "leave the peer's memory"),
        ("put", 0, 0, 1 << 63, "leave the peer's memory"),
        ("put", 1025, 0, 0, "0 bytes at offset 1025 leave the peer's memory"),
        ("get", 512 - 8, 0, 16, "16 bytes at offset 504 leave the local memory of 512 bytes"),
        ("get", 0, 1024 - 8, 16, "16 bytes at offset 1016 leave the peer's memory of 1024 bytes"),
        ("putPackets", 1024 - 16, 0, 16, "32 bytes at offset 1008 leave the peer's memory"),
        ("putPackets", 0, 512 - 8, 16, "16 bytes at offset 504 leave the local memory"),
        ("getPackets", 256 - 16, 0, 16, "32 bytes at offset 240 leave the packet buffer of 256 bytes"),
        ("getPackets", 0, 512 - 8, 16, "16 bytes at offset 504 leave the local memory"),
        # putPackets writes packets of 16 bytes, 8 of them data; getPackets reads packets of 8 bytes, 4 of them data.
        ("putPackets", 0, 0, 404, "404 bytes at offset 0 of the local memory; expected multiples of 8 bytes"),
        ("putPackets", 0, 0, 5, "5 bytes at offset 0 of the local memory; expected multiples of 8 bytes"),
        ("putPackets", 0, 4, 16, "16 bytes at offset 4 of the local memory; expected multiples of 8 bytes"),
        ("putPackets", 8, 0, 16, "32 bytes at offset 8 of the peer's memory; expected multiples of 16 bytes"),
        ("getPackets", 0, 0, 6, "6 bytes at offset 0 of the local memory; expected multiples of 4 bytes"),
        ("getPackets", 4, 0, 8, "16 bytes at offset 4 of the packet buffer; expected multiples of 8 bytes"),
    ],
)
def test_an_access_outside_an_sm_channels_memory_moves_nothing(
    call: str, first: int, second: int, nbytes: int, reason: str
) -> None:
    def body(comm: Communicator) -> BaseException | None:
        target, source, packets = (comm.empty(size, "uint8").fill(comm.rank) for size in (1024, 512, 256))
        channels = comm.sm_channels(target, source, packet_buffer=packets)
        kernels = comm.compile(SM_ACCESSES)
        meet(comm)
        if comm.rank == 0:
            kernels[call](1, 32, channels[0], first, second, nbytes)
            error = caught(comm.synchronize)
        else:
            error = caught(lambda: barrier(comm))
        assert all((array.numpy() == comm.rank).all() for array in (target, source, packets))
        return error

    for error in run_ranks(2, body):
        assert isinstance(error, TriggerError), error
        assert (error.rank, error.peer, error.operation) == (0, 1, call)
        assert f"called {call} on its SmChannel to rank 1: " in str(error)
        assert reason in str(error)


@NO_PROXY
def test_an_sm_channel_reaches_to_the_end_of_its_memory() -> None:
    def body(comm: Communicator) -> None:
        target, source = comm.empty(1024, "uint8").fill(comm.rank), comm.empty(512, "uint8").fill(comm.rank)
        channels = comm.sm_channels(target, source)
        kernels = comm.compile(SM_ACCESSES)
        barrier(comm)
        kernels.put(1, 32, channels[0], 512, 0, 512)
        kernels.put(1, 32, channels[0], 1024, 512, 0)
        kernels.putPackets(1, 32, channels[0], 496, 504, 8)
        barrier(comm)
        kernels.get(1, 32, channels[0], 0, 512, 512)
        barrier(comm)
        assert (target.numpy()[512:] == 1 - comm.rank).all()
        assert (source.numpy() == comm.rank).all()

    run_ranks(2, body)


@NO_PROXY
def test_packet_flag_zero_is_refused() -> None:
    def body(comm: Communicator) -> BaseException | None:
        channels = comm.sm_channels(comm.empty(16))
        kernels = comm.compile(PUSH)
        kernels.packets(1, 1, channels, 7)
        comm.synchronize()
        meet(comm)
        if comm.rank == 0:
            kernels.packets(1, 1, channels, 0)
            return caught(comm.synchronize)
        return caught(lambda: barrier(comm))

    errors = run_ranks(2, body)
    assert all(isinstance(error, TriggerError) and "flag 0" in str(error) for error in errors), errors


# -- failures of the proxy ---


def test_a_ring_that_stays_full_ends_the_wait_for_room() -> None:
    with Gate() as gate:

        def body(comm: Communicator) -> BaseException | None:
            channel = comm.handler_channel(lambda _: gate.wait())
            kernel = comm.compile(PUSH, "custom")
            impatient(comm)
            kernel(1, 8, channel, 10)
            error = caught(comm.synchronize)
            gate.open()
            return error

        (error,) = run_ranks(1, body, fifo_size=4)
    assert isinstance(error, WaitTimeoutError)
    assert "room in the trigger ring" in str(error)


def test_close_is_bounded_while_a_handler_blocks() -> None:
    with Gate() as gate:
        ended: list[bool] = []

        def handler(_: Trigger) -> None:
            gate.wait()
            ended.append(True)

        (comm,) = (Communicator(b, timeout=TIMEOUT) for b in ThreadBootstrap.create(1))
        kernel, channel = comm.compile(PUSH, "custom"), comm.handler_channel(handler)
        impatient(comm)
        kernel(1, 1, channel, 1)
        assert isinstance(caught(comm.synchronize), WaitTimeoutError)
        started = time.monotonic()
        comm.close()
        assert time.monotonic() - started < TIMEOUT / 2
        assert not ended
    deadline = time.monotonic() + TIMEOUT
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended


@pytest.mark.parametrize("kind", [KeyError, SystemExit])
def test_a_handler_error_carries_its_cause(kind: type[BaseException]) -> None:
    def refuse(trigger: Trigger) -> None:
        raise kind(trigger.channel)

    def body(comm: Communicator) -> BaseException | None:
        comm.compile(PUSH, "custom")(1, 1, comm.handler_channel(refuse), 1)
        return caught(comm.synchronize)

    (error,) = run_ranks(1, body)
    assert isinstance(error, HandlerError)
    assert isinstance(error.__cause__, kind)
    assert error.channel == error.__cause__.args[0]


_Copy = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_Write = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint)
_Query = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


def faulty(runtime: Runtime, **functions: object) -> Runtime:
    """Replaces the runtime's driver calls that `functions` names, and returns the runtime."""
    addresses = {name: ctypes.cast(f, ctypes.c_void_p).value or 0 for name, f in functions.items()}
    runtime.calls = replace(runtime.calls, **addresses)
    return runtime


def with_faulty_proxy(timeout: float = TIMEOUT, **functions: object) -> list[BaseException | None]:
    """Lets rank 0 put and flush, and then both ranks wait for a signal that never comes. `functions` replaces driver
    calls of rank 0's proxy. Returns the errors of both ranks.
    """

    def rank_main(comm: Communicator) -> BaseException | None:
        memory = comm.register(comm.empty(SIZE, "uint8"))
        channels = comm.proxy_channels(memory)
        kernels = comm.compile(PUSH)
        impatient(comm, timeout)
        if comm.rank == 0:
            kernels.put(1, 1, channels, memory.peer_id(1), 64, memory.id, 0, 16)
        kernels.wait(1, 1, channels)
        return caught(comm.synchronize)

    def make_runtime(rank: int) -> Runtime:
        return faulty(rank_runtime(rank), **functions) if rank == 0 else rank_runtime(rank)

    with Ranks(2, make_runtime=make_runtime) as ranks:
        return ranks.run(rank_main)


@pytest.mark.own_proxy(reason="its copies are this process's")
def test_a_refused_copy_is_a_transport_error_everywhere() -> None:
    errors = with_faulty_proxy(copy=_Copy(lambda *_: 700))
    assert all(isinstance(error, TransportError) for error in errors), errors
    for error in errors:
        assert isinstance(error, TransportError)
        assert (error.rank, error.peer, error.operation, error.offset) == (0, 1, "data", 64)
        assert "700" in str(error)


@pytest.mark.own_proxy(reason="its copies are this process's")
def test_a_copy_that_fails_later_is_a_transport_error_everywhere() -> None:
    errors = with_faulty_proxy(event_query=_Query(lambda _: 701))
    for error in errors:
        assert isinstance(error, TransportError)
        assert error.peer == 1
        assert "a transfer to rank 1 failed with status 701" in str(error)


def test_a_flush_that_cannot_complete_runs_into_the_time_out() -> None:
    errors = with_faulty_proxy(SHORT, write64=_Write(lambda *_: 0))
    assert all(isinstance(error, WaitTimeoutError) for error in errors), errors
    assert "flush" in str(errors[0]) or "signal" in str(errors[0])


# -- out of memory ---


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def _no_memory_to_begin(thread: threading.Thread, start: Callable[[threading.Thread], None]) -> None:
    vars(thread)["_bootstrap"] = lambda: None  # a thread that starts without memory does nothing
    start(thread)


@pytest.mark.parametrize(
    "refuse",
    [
        pytest.param(_no_thread, marks=pytest.mark.full),
        functools.partial(_no_memory_to_begin, start=threading.Thread.start),
    ],
    ids=["no-thread", "no-memory-to-begin"],
)
def test_a_failure_ends_what_streams_wait_for_where_no_thread_can_be_started(
    refuse: Callable[[threading.Thread], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    start, queued, exhausted = threading.Thread.start, threading.Event(), threading.Event()

    def start_some(thread: threading.Thread) -> None:
        (refuse if exhausted.is_set() and thread.name.startswith("proxyccl") else start)(thread)

    monkeypatch.setattr(threading.Thread, "start", start_some)

    def body(comm: Communicator) -> BaseException | None:
        x, stream = ones(comm), comm.runtime.create_stream()
        comm.all_reduce(x, algorithm="proxy")
        comm.synchronize()
        meet(comm)
        if comm.rank == 0:
            comm.all_reduce(x, algorithm="proxy", stream=stream)
            queued.set()
            return caught(lambda: comm.synchronize(stream))
        assert queued.wait(TIMEOUT)
        exhausted.set()
        monkeypatch.setattr(threads, "_BEGIN_SECONDS", 0.1)
        comm.abort("of the test")
        return caught(comm.synchronize)

    errors = run_ranks(2, body)
    assert all(isinstance(error, AbortedError) for error in errors), errors


# -- ranks that disagree ---


def differing(comm: Communicator, field: str) -> None:
    """Makes a call, which differs in `field` on the rank VICTIM, and waits until the call ends."""
    x = on_device(comm, np.ones(12, np.float32))
    whole = on_device(comm, np.ones(12, np.int32))
    calls: dict[str, Callable[[], object]] = {
        "collective": lambda: comm.broadcast(x, 0),
        "dtype": lambda: comm.all_reduce(whole, "sum", algorithm="two_shot"),
        "op": lambda: comm.all_reduce(x, "max", algorithm="two_shot"),
        "algorithm": lambda: comm.all_reduce(x, "sum", algorithm="ring"),
        "root": lambda: comm.broadcast(x, 2),
        "count": lambda: comm.all_reduce(x[:11], "sum", algorithm="two_shot"),
        "shape": lambda: comm.broadcast(on_device(comm, np.ones((4, 3), np.float32)), 0),
    }
    if comm.rank == VICTIM:
        calls[field]()
    elif field in ("root", "shape"):
        comm.broadcast(x, 0)
    else:
        comm.all_reduce(x, "sum", algorithm="two_shot")
    comm.synchronize()


@NO_PROXY
@pytest.mark.parametrize("field", ["collective", "dtype", "op", "algorithm", "root", "count", "shape"])
@pytest.mark.parametrize("warm", [pytest.param(False, marks=pytest.mark.full), True], ids=["first-call", "later-call"])
def test_a_difference_between_ranks_is_named_on_every_rank(field: str, warm: bool) -> None:
    def body(comm: Communicator) -> BaseException | None:
        def calls() -> None:
            if warm:
                on_host(comm.all_reduce(on_device(comm, np.ones(12, np.float32))))
            differing(comm, field)

        return caught(calls)

    errors = run_ranks(3, body)
    for error in errors:
        assert isinstance(error, MismatchError), errors
        assert error.argument == field
        assert field in str(error)
    if field == "collective":
        both = ("all_reduce here, broadcast on rank", "broadcast here, all_reduce on rank")
        assert any(text in str(error) for error in errors for text in both)
    for rank, error in enumerate(errors):  # the rank that finds the difference sends both calls to all ranks
        assert isinstance(error, MismatchError)
        here = "here" if error.rank == rank else f"on rank {error.rank}"
        assert re.search(rf": .* {here}, .* on rank {error.peer}$", str(error)), error


@NO_PROXY
def test_a_failure_keeps_no_array_of_the_caller() -> None:
    """The arrays of a training step that failed are freed without a garbage collection."""
    held: list[weakref.ref[Any]] = []

    def step(comm: Communicator) -> None:
        activations = np.ones(12)
        held.append(weakref.ref(activations))
        differing(comm, "op")

    def body(comm: Communicator) -> None:
        for _ in range(2):
            with contextlib.suppress(MismatchError):
                step(comm)
        wait_for(lambda: all(ref() is None for ref in held), "nothing refers to the arrays")

    gc.disable()
    try:
        run_ranks(3, body)
    finally:
        gc.enable()
    assert len(held) == 6


@pytest.mark.gpu_only
@pytest.mark.hip_full
def test_failed_calls_leave_the_device_usable() -> None:
    """After a time-out, a kernel's threads must not read beyond the slots in scratch memory: such a read destroys the
    CUDA context. If threads made such reads, about one call in fifty would fail.
    """
    # With only two ranks, no thread could read beyond the slots.
    result = run_mpi(3, PROGRAMS / "differing_calls.py", "--count", "60")
    assert result.returncode == 0, result.stderr


# -- exhausted resources ---


def test_the_509th_memory_id_is_a_resource_error() -> None:
    def body(comm: Communicator) -> None:
        array = comm.empty(4096, "uint8")
        registered = [comm.register(array) for _ in range(509)]
        ids = [memory.id for memory in registered[:508]]
        assert ids == list(range(508))
        with pytest.raises(ResourceError, match="508"):
            _ = registered[508].id
        registered[100].close()
        assert registered[508].id == 100

    run_ranks(1, body)


def test_the_1025th_channel_is_a_resource_error() -> None:
    def body(comm: Communicator) -> None:
        for _ in range(1024):
            comm.handler_channel(print)
        with pytest.raises(ResourceError, match="1024"):
            comm.handler_channel(print)
        comm.all_reduce(ones(comm))  # the communicator still works

    run_ranks(1, body)


@NO_PROXY
def test_too_much_device_memory_is_a_resource_error() -> None:
    def body(comm: Communicator) -> None:
        for size in (1 << 62, 1 << 66):
            with pytest.raises(ResourceError, match=r"can't (allocate|map)"):
                comm.empty(size, "uint8")

    run_ranks(1, body)


@NO_PROXY
def test_an_allocation_is_retried_if_another_thread_has_just_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(comm: Communicator) -> None:
        memory = comm.group.device_memory
        allocate = memory.allocate

        def no_memory_at_first(*arguments: Any) -> Any:
            monkeypatch.setattr(memory, "allocate", allocate)
            raise ResourceError("can't allocate")

        monkeypatch.setattr(memory, "allocate", no_memory_at_first)
        assert comm.empty(16, "uint8").nbytes == 16

    run_ranks(1, body)


# -- closing ---


def test_closing_twice_does_nothing() -> None:
    def body(comm: Communicator) -> None:
        comm.all_reduce(ones(comm))
        comm.close()
        comm.close()
        assert comm.closed
        assert not comm.group.failure.aborted
        assert "closed" in repr(comm)

    run_ranks(2, body)


def test_close_waits_for_work_in_flight() -> None:
    def body(comm: Communicator) -> None:
        stream = comm.runtime.create_stream()
        x = on_device(comm, np.full(500_000, comm.rank + 1, np.int64))
        for _ in range(5):
            comm.all_reduce(x, "max", stream=stream)
        comm.close()
        assert (on_host(x) == 3).all()

    run_ranks(3, body)


def test_close_with_work_that_can_never_end_is_bounded() -> None:
    """One rank calls a collective that the others never join, and then closes the communicator."""

    def body(comm: Communicator) -> BaseException | None:
        stream = comm.runtime.create_stream()
        barrier(comm)
        impatient(comm)

        def end() -> None:
            if comm.rank == 0:
                comm.all_reduce(ones(comm), stream=stream)
            comm.close()

        return caught(end)

    started = time.monotonic()
    run_ranks(3, body)
    assert time.monotonic() - started < TIMEOUT


USES: dict[str, Callable[[Communicator], object]] = {
    "empty": lambda comm: comm.empty(4),
    "register": lambda comm: comm.register(np.ones(4)),
    "sm_channels": lambda comm: comm.sm_channels(np.ones(4)),
    "proxy_channels": lambda comm: comm.proxy_channels(np.ones(4)),
    "handler_channel": lambda comm: comm.handler_channel(print),
    "compile": lambda comm: comm.compile('extern "C" __global__ void f() {}'),
    "all_reduce": lambda comm: comm.all_reduce(np.ones(4, np.float32)),
    "all_gather": lambda comm: comm.all_gather(np.ones(4)),
    "reduce_scatter": lambda comm: comm.reduce_scatter(np.ones(4)),
    "all_to_all": lambda comm: comm.all_to_all(np.ones(4)),
    "broadcast": lambda comm: comm.broadcast(np.ones(4)),
    "barrier": lambda comm: comm.barrier(),
    "proxy": lambda comm: comm.proxy,
}


@pytest.mark.parametrize("use", USES)
def test_use_after_close_is_refused(use: str) -> None:
    def body(comm: Communicator) -> None:
        comm.close()
        with pytest.raises(ClosedError, match="closed"):
            USES[use](comm)
        comm.check()
        comm.abort()

    run_ranks(2, body)


@pytest.mark.parametrize("use", USES)
def test_use_after_a_failure_raises_the_failure_again(use: str) -> None:
    def body(comm: Communicator) -> None:
        comm.abort("enough")
        with pytest.raises(AbortedError, match="ended the communicator"):
            USES[use](comm)

    run_ranks(2, body)


@NO_PROXY
def test_a_lost_context_ends_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a GPU's runtime can lose its context, so this test simulates the driver's answer."""

    def lost() -> bool:
        raise DriverError("cuStreamQuery", 716, "misaligned")

    def body(comm: Communicator) -> BaseException | None:
        if comm.rank == 1:
            monkeypatch.setattr(comm.group.launches.default_stream, "query", lost)
            while caught(comm.check) is None:
                time.sleep(0.001)
        return caught(lambda: (comm.all_reduce(ones(comm)), comm.synchronize()))

    errors = run_ranks(3, body)
    assert all(isinstance(error, ContextLostError) and error.rank == 1 for error in errors), errors
    assert str(errors[0]).startswith("rank 1 lost its context on the GPU: a kernel accessed a misaligned address")


def test_abort_ends_the_waits_of_the_others() -> None:
    def body(comm: Communicator) -> BaseException | None:
        if comm.rank == 0:
            comm.abort("for a reason")
            return caught(comm.check)
        return caught(lambda: (comm.all_reduce(ones(comm)), comm.synchronize()))

    errors = run_ranks(3, body)
    assert all(isinstance(error, AbortedError) and error.rank == 0 for error in errors), errors
    assert str(errors[0]) == "this rank ended the communicator: for a reason"
    assert all(str(error) == "rank 0 ended the communicator: for a reason" for error in errors[1:])


@NO_PROXY
@pytest.mark.parametrize("local_world_size", [None, 2], ids=["one-host", "two-hosts"])
def test_all_ranks_hear_which_error_a_rank_raised(local_world_size: int | None) -> None:
    lines = [f"line {number} of a long text" for number in range(100)]

    def body(comm: Communicator) -> BaseException | None:
        def leave() -> None:
            with comm:
                if comm.rank == 3:
                    raise ArgumentError("exp_indices", "\n".join(lines))
                comm.all_reduce(ones(comm))
                comm.synchronize()

        return caught(leave)

    errors = run_ranks(4, body, local_world_size=local_world_size)
    for error in errors[:3]:
        assert isinstance(error, AbortedError)
        first, *more = str(error).removesuffix(" …").split("\n")
        assert first == f"rank 3 ended the communicator: it raised ArgumentError: exp_indices: {lines[0]}"
        assert more == lines[1 : 1 + len(more)], "whole lines"
        assert 500 < len(str(error)) < 1100


@NO_PROXY
@pytest.mark.host_only(reason="a GPU does not report that its threads deadlocked")
def test_a_deadlocked_kernel_leaves_the_communicator_alive() -> None:
    def body(comm: Communicator) -> None:
        comm.compile(PUSH, "half_a_barrier")(1, 4)
        with pytest.raises(KernelError, match="deadlock"):
            comm.synchronize()
        assert (on_host(comm.all_reduce(ones(comm))) == 2).all()

    run_ranks(2, body)


@pytest.mark.host_only(reason="a failing kernel ends a GPU's context")
def test_close_is_clean_after_kernels_that_failed_on_two_streams() -> None:
    def body(comm: Communicator) -> None:
        kernel = comm.compile(PUSH, "half_a_barrier")
        for _ in range(2):
            kernel(1, 4, stream=comm.runtime.create_stream())
        comm.close()

    run_ranks(1, body)


def test_a_process_that_saw_a_failure_can_start_again() -> None:
    for _ in range(2):

        def fail(comm: Communicator) -> BaseException | None:
            return caught(lambda: differing(comm, "op"))

        assert all(isinstance(error, MismatchError) for error in run_ranks(3, fail))

        def work(comm: Communicator) -> float:
            return float(on_host(comm.all_reduce(ones(comm)))[0])

        assert run_ranks(3, work) == [3.0] * 3


def _in_every_way(comm: Communicator) -> None:
    for algorithm in ("proxy", None):
        comm.all_reduce(on_device(comm, np.ones(1000, np.float32)), algorithm=algorithm)


def _until_it_fails(comm: Communicator) -> None:
    """Makes calls until the communicator fails, and shrinks the communicator. The exception's traceback keeps the array
    alive, but the array must keep no descriptor or thread alive.
    """
    array = comm.empty(1000, "float32").fill(1)
    try:
        comm.barrier()
        comm.synchronize()
        if comm.rank == 1:
            comm.abort("of the test")
        while True:
            comm.all_reduce(array)
            comm.synchronize()
    except AbortedError:
        shrunk = comm.shrink()
    shrunk.all_reduce(array)
    shrunk.close()


@pytest.mark.parametrize("body", [_in_every_way, pytest.param(_until_it_fails, marks=pytest.mark.hip_full)])
def test_communicators_give_back_descriptors_and_threads(body: Callable[[Communicator], None]) -> None:
    run_ranks(3, body)  # a process's first calls may leave descriptors and threads
    before = settled()
    for _ in range(3):
        run_ranks(3, body)
    assert settles(before)
