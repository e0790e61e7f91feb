"""Counting semaphores between two ranks: the twin of shared_semaphore.h. Only one program at a time may wait on a
semaphore, and only one may signal it.

Counters only grow and are never reset, so a captured graph can be replayed.

A function that waits takes its semaphore as a tuple: pointers to the word that counts the peer's signals (`inbound`)
and to the word that counts consumed signals (`expected`); the control block; and the kind of wait, the peer and the
channel, by which an error describes the wait.
"""

from __future__ import annotations

from typing import Any

import triton.language as tl
from proxyccl.triton import layout as c
from proxyccl.triton.basics import INTERPRETED, jit, u32, u64
from proxyccl.triton.target import (
    load_acquire_system,
    load_relaxed_device,
    pause,
    store_relaxed_system,
    store_release_system,
    sync_threads_system,
)
from proxyccl.triton.waits import record_error, wait_at_least

if INTERPRETED:
    # If two programs wait on one semaphore at the same time, both may take the same signal, or one may wait for a
    # signal that never comes. So the second wait ends the communicator. Only the interpreter checks this, because on a
    # GPU the check would cost every wait an access to memory.
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
    """Waits for the next signal and consumes it; see `wait` and `sm_wait`."""
    came = _consume(semaphore, load_relaxed_device(semaphore[1]) + 1)
    tl.debug_barrier()  # no thread may read `expected` for the next wait before the store
    return came != 0


@jit
def wait_for_count(semaphore, count):
    """Waits until the number of signals has reached a count, and consumes them; see `wait_until` and
    `sm_wait_until`.
    """
    target = u64(count)
    came = tl.full([], 1, tl.int32)
    if load_relaxed_device(semaphore[1]) < target:
        came = _consume(semaphore, target)
    tl.debug_barrier()
    return came != 0


@jit
def poll_for_signal(inbound, expected):
    """Consumes the next signal if it has arrived, and returns whether it has; see `poll` and `sm_poll`."""
    consumed = load_relaxed_device(expected)
    came = load_acquire_system(inbound) > consumed
    if came:
        tl.store(expected, consumed + 1)
    else:
        pause(0)
    tl.debug_barrier()
    return came


@jit
def signal_peer(remote_inbound, outbound):
    """Adds one to the peer's semaphore, with release order after the stores of all threads of the program."""
    sync_threads_system()
    sent = load_relaxed_device(outbound) + 1
    store_release_system(remote_inbound, sent)
    tl.store(outbound, sent)
    tl.debug_barrier()


@jit
def signal_peer_up_to(remote_inbound, outbound, control, kind, peer, channel, count):
    """Sets the peer's semaphore to a count, with release order after the stores of all threads of the program. Ends the
    communicator if the count is not above all earlier counts.
    """
    sync_threads_system()
    target = u64(count)
    sent = load_relaxed_device(outbound)
    if target > sent:
        store_release_system(remote_inbound, target)
        tl.store(outbound, target)
    else:
        record_error(control, u32(c.ERROR_SIGNAL_VALUE), kind, peer, channel, sent, target, u32(0), u64(0), u64(0))
    tl.debug_barrier()


@jit
def signal_peer_relaxed(remote_inbound, outbound):
    """Adds one to the peer's semaphore without ordering any stores, for a signal that announces no data."""
    sent = load_relaxed_device(outbound) + 1
    store_relaxed_system(remote_inbound, sent)
    tl.store(outbound, sent)
    tl.debug_barrier()
