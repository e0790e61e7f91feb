"""Implements a barrier over the programs of a grid, as DeviceSyncer (sync.h) does in C++."""

from __future__ import annotations

import struct

import triton.language as tl
from proxyccl.channels.communicator import Communicator
from proxyccl.device._native import ffi
from proxyccl.triton import layout as c
from proxyccl.triton.basics import jit, longs_at, u32, u64
from proxyccl.triton.target import load_relaxed_device, store_relaxed_device, store_release_device, sync_threads_system
from proxyccl.triton.waits import wait_at_least


class GridBarrier:
    """The barrier object that `sync_grid` takes. Each rank makes its own barriers, without the other ranks.

    Only one kernel at a time may use a barrier. A kernel may call `sync_grid` several times. Later launches may reuse
    the barrier, even with other grids.

    Args:
        communicator: the communicator whose time-out or failure ends the waits.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._runtime, self._control = communicator.runtime, communicator.group.control
        self._memory = communicator.group.device_memory.allocate(c.BARRIER_BYTES, "channels")
        self._reset()

    def _reset(self) -> None:
        """Resets the barrier's counters, while no program uses the barrier. If a program raised an exception while it
        waited at the barrier, the barrier has counted that program as arrived and must be reset.
        """
        words = struct.pack("<3Q", 0, 0, self._control.device_pointer)
        self._runtime.copy(self._memory.ptr, int(ffi.cast("uintptr_t", ffi.from_buffer(words))), len(words))

    @property
    def device_pointer(self) -> int:
        """The barrier's address in device memory."""
        return self._memory.ptr


@jit
def sync_grid(barrier):
    """Waits until every program of the grid has called this function. Stores of any program before the barrier are
    visible to all programs after the barrier.

    All programs of the grid must be resident on the device at the same time.

    Args:
        barrier: a `GridBarrier`.

    Returns:
        True, or False if the communicator has ended or the time-out has passed; the kernel should then return.
    """
    tl.static_assert(barrier.dtype == tl.pointer_type(tl.uint32), "expected a GridBarrier")
    barrier = longs_at(barrier)
    programs = u64(tl.num_programs(0)) * u64(tl.num_programs(1)) * u64(tl.num_programs(2))
    sync_threads_system()
    complete = tl.full([], 1, tl.int32)
    generation = barrier + c.BARRIER_GENERATION_8
    now = load_relaxed_device(generation)
    tl.debug_barrier()  # every thread must read the generation before the last program changes it
    # The addition releases this program's stores. The last program's addition acquires all programs' stores, and its
    # store of the generation releases all these stores.
    if tl.atomic_add(barrier + c.BARRIER_ARRIVED_8, u64(1), sem="acq_rel", scope="gpu") == programs - 1:
        store_relaxed_device(barrier + c.BARRIER_ARRIVED_8, u64(0))
        store_release_device(generation, now + 1)
    else:
        complete = wait_at_least(
            generation,
            now + 1,
            tl.load(barrier + c.BARRIER_CONTROL_8),
            u32(c.WAIT_GRID),
            u32(c.NO_PEER),
            u32(c.NO_CHANNEL),
        )
    tl.debug_barrier()
    return complete != 0
