"""A wait without a control block uses the control block of the communicator that compiled the waiting kernel."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import pytest

from proxyccl import (
    AbortedError,
    Communicator,
    ProxyCCLError,
    Runtime,
    ThreadBootstrap,
    TriggerError,
    WaitTimeoutError,
)
from support.devices import rank_runtime
from support.running import SHORT, TIMEOUT, impatient, run_ranks

KERNELS = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
__device__ DeviceSyncer syncer;
extern "C" __global__ void grid(int* done) {
  const bool met = syncer.sync(gridDim.x + 1);  // one more than there are
  if (threadIdx.x == 0) done[0] = met ? 1 : -1;
}
extern "C" __global__ void meet(DeviceSyncer* other, int* done) { done[blockIdx.x] = other->sync(2) ? 1 : -1; }
extern "C" __global__ void packet(const LL16Packet* packet, int* done) {
  done[0] = readPacket(packet, 7).x == 0 ? -1 : 1;
}
extern "C" __global__ void flag_0(ProxycclSmChannel channel) {
  flagIsValid(0, nullptr, channel.peer, channel.channel);
}
extern "C" __global__ void until_aborted(int* done) {
  for (uint32_t spins = 0; !aborted(); ++spins) spinHint(spins);
  done[0] = -1;
}
extern "C" __global__ void wait_when_aborted(int* polls) {
  for (uint32_t spins = 0; !aborted(); ++spins) spinHint(spins);
  waitUntil(nullptr, {PROXYCCL_WAIT_GRID, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL, 0}, [&](uint64_t*) {
    ++*polls;
    return false;
  });
  if (!PROXYCCL_ON_HOST) *polls -= kFirstCheck;
}
extern "C" __global__ void control_block(uint64_t* out) { *out = reinterpret_cast<uint64_t>(defaultControl()); }
"""


def alone(runtime: Runtime) -> Communicator:
    """Returns a communicator of one rank."""
    return Communicator(ThreadBootstrap.create(1)[0], runtime, timeout=TIMEOUT)


def caught(action: Callable[[], object]) -> BaseException | None:
    try:
        action()
    except ProxyCCLError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("kernel", "awaited", "bound"),
    # A barrier of the grid times out later than a wait for a peer, because only the wait knows the late rank.
    [("grid", "the other blocks of the grid", 2 * SHORT), ("packet", "a packet", SHORT)],
)
def test_a_wait_ends_in_time_and_is_named_on_all_ranks(kernel: str, awaited: str, bound: float) -> None:
    def body(comm: Communicator) -> BaseException | None:
        packets, done = comm.empty(64, "uint8").fill(0), comm.empty(1, "int32").fill(0)
        kernels = comm.compile(KERNELS)
        impatient(comm)
        started = time.monotonic()
        if comm.rank == 1:
            kernels.until_aborted(1, 1, done)
        elif kernel == "grid":
            kernels.grid(1, 2, done)
        else:
            kernels.packet(1, 1, packets, done)
        error = caught(comm.synchronize)
        assert bound - 0.5 < time.monotonic() - started < TIMEOUT / 2
        assert done.numpy()[0] == -1
        return error

    errors = run_ranks(2, body)
    for error in errors:
        assert isinstance(error, WaitTimeoutError), errors
        assert (error.rank, error.operation, error.channel) == (0, f"wait for {awaited}", None)
        assert f"waited too long for {awaited}: expected" in str(error)


def test_a_barrier_at_which_blocks_gave_up_serves_another_communicator() -> None:
    runtime = rank_runtime(0)
    syncer = runtime.allocate(8)
    for blocks in (1, 1, 2):  # with one block, the kernel's barrier of two blocks times out
        with alone(runtime) as comm:
            done = comm.empty(2, "int32").fill(0)
            kernel = comm.compile(KERNELS, "meet")
            impatient(comm)
            kernel(blocks, 1, syncer.ptr, done)
            error = caught(comm.synchronize)
            assert isinstance(error, WaitTimeoutError) == (blocks == 1)
            assert done.numpy().tolist() == ([-1, 0] if blocks == 1 else [1, 1])


def test_a_refused_flag_is_told() -> None:
    def body(comm: Communicator) -> BaseException | None:
        channels = comm.sm_channels(comm.empty(16))
        kernel = comm.compile(KERNELS, "flag_0")
        comm.all_gather_bytes(b"")  # neither rank fails before the other is ready
        kernel(1, 1, channels[0])
        return caught(comm.synchronize)

    assert all(isinstance(error, TriggerError) for error in run_ranks(2, body))


def test_a_wait_looks_early_whether_its_communicator_has_ended() -> None:
    """On the host runtime, a wait checks for an abort before it yields its time slice, so that waits of an aborted
    kernel end without yielding.
    """
    runtime = rank_runtime(0)
    with alone(runtime) as comm:
        polls, stream = comm.empty(1, "int32").fill(0), runtime.create_stream()
        comm.compile(KERNELS, "wait_when_aborted")(1, 1, polls, stream=stream)
        comm.abort("enough")
        stream.synchronize()
        assert polls.numpy()[0] == 1


def test_communicators_of_a_runtime_end_their_own_kernels() -> None:
    runtime = rank_runtime(0)
    with alone(runtime) as first, alone(runtime) as second:
        streams = [runtime.create_stream() for _ in range(2)]
        kernels = [comm.compile(KERNELS, "until_aborted") for comm in (first, second)]
        done = [comm.empty(1, "int32") for comm in (first, second)]
        for kernel, out, stream in zip(kernels, done, streams, strict=True):
            kernel(1, 1, out, stream=stream)
        first.abort("enough")
        streams[0].synchronize()
        assert isinstance(caught(first.check), AbortedError)
        assert not streams[1].query()
        second.check()
        second.abort("enough of this one too")
        streams[1].synchronize()


def test_a_kernel_outliving_its_communicator_has_no_control() -> None:
    runtime = rank_runtime(0)
    out, word = runtime.allocate(8), ctypes.c_uint64()

    def value() -> int:
        kernel(1, 1, out.ptr)
        runtime.synchronize()
        runtime.copy(ctypes.addressof(word), out.ptr, 8)
        return word.value

    with alone(runtime) as comm:
        kernel = comm.compile(KERNELS, "control_block")
        assert value() == comm.group.control.device_pointer
    assert value() == 0
    with alone(runtime) as comm:
        assert value() == 0
        kernel = comm.compile(KERNELS, "control_block")
        assert value() == comm.group.control.device_pointer


def test_communicators_that_come_and_go_leave_no_module_behind() -> None:
    runtime = rank_runtime(0)
    for _ in range(3):
        with alone(runtime) as comm:
            comm.compile(KERNELS)
            comm.compile(KERNELS)
            assert len(runtime._modules[comm.group.control.device_pointer]) == 1  # type: ignore[attr-defined]
    assert set(runtime._modules) <= {0}  # type: ignore[attr-defined]
