"""Implements waits for counting semaphores between two ranks, as shared_semaphore.h does in C++. Only one program at a
time may wait on a semaphore.

Counters only grow and are never reset, so a captured graph can be replayed.

A function that waits takes its semaphore as a tuple (inbound, expected, control, kind, peer, channel). `inbound` points
to the count of the peer's signals, `expected` to the count of consumed signals, and `control` is the control block. In
an error, `kind`, `peer` and `channel` describe the wait.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from proxyccl.triton import layout as c
from proxyccl.triton.basics import INTERPRETED, jit, u32, u64
from proxyccl.triton.target import load_acquire_system, load_relaxed_device, pause
from proxyccl.triton.waits import record_error, wait_at_least

if INTERPRETED:
    # If two programs wait on one semaphore at the same time, both may take the same signal, or one program may wait for
    # a signal that never arrives. So in the interpreter, the second wait ends the communicator. On a GPU, this check
    # would cost every wait an access to memory.
    def _wait_alone(semaphore: Any, target: Any) -> Any:
        inbound, expected, control, kind, peer, channel = semaphore
        if tl.atomic_xchg(expected + 1, u64(1), sem="relaxed", scope="gpu") != 0:
            record_error(control, u32(c.ERROR_SHARED_WAIT), kind, peer, channel, target, u64(0), u32(0), u64(0), u64(0))
            return tl.full([], 0, tl.int32)
        try:
            return wait_at_least(inbound, target, control, kind, peer, channel)
        finally:
            tl.atomic_xchg(expected + 1, u64(0), sem="relaxed", scope="gpu")

else:

    @jit
    def _wait_alone(semaphore, target):
        inbound, _, control, kind, peer, channel = semaphore
        return wait_at_least(inbound, target, control, kind, peer, channel)


@jit
def _consume(semaphore, target):
    came = _wait_alone(semaphore, target)
    if came != 0:
        tl.store(semaphore[1], target)
    return came


@jit
def wait_for_signal(semaphore):
    """Waits for the next signal and consumes the signal; see `wait`."""
    came = _consume(semaphore, load_relaxed_device(semaphore[1]) + 1)
    tl.debug_barrier()  # no thread may begin the next wait before `expected` is stored
    return came != 0


@jit
def wait_for_count(semaphore, count):
    """Waits until the number of signals has reached a count, and consumes these signals; see `wait_until`."""
    target = u64(count)
    came = tl.full([], 1, tl.int32)
    if load_relaxed_device(semaphore[1]) < target:
        came = _consume(semaphore, target)
    tl.debug_barrier()
    return came != 0


@jit
def poll_for_signal(inbound, expected):
    """Consumes the next signal if the signal has arrived, and returns whether it has arrived."""
    consumed = load_relaxed_device(expected)
    came = load_acquire_system(inbound) > consumed
    if came:
        tl.store(expected, consumed + 1)
    else:
        pause(0)
    tl.debug_barrier()
    return came
