"""Converts the C engine's error codes to exceptions, and lets signal handlers run while the engine waits."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable

from proxyccl.channels.transfers.errors import ActiveError, DisconnectedError, TransferError
from proxyccl.device.errors import ArgumentError
from proxyccl.device.process.interrupts import SLICE_MS
from proxyccl.proxy._transfers import lib


def raise_status(status: int, peer: str, lost: str = "") -> None:
    """Raises the exception for an errno, or nothing for 0. `lost` is the reason why the link to the peer was lost, if
    it was."""
    if status == 0:
        return
    if status == errno.EBUSY:
        raise ActiveError(f"the transfer with agent {peer} is active; it can be started again when it has ended", peer)
    if status == errno.EMSGSIZE:
        raise ArgumentError("message", f"is too long; expected at most {lib.PROXYCCL_LONGEST_MESSAGE} bytes")
    if status == errno.ENOTCONN:
        raise DisconnectedError(f"agent {peer}: {lost}", peer)
    if status == errno.ENOBUFS:
        raise TransferError(f"agent {peer} takes no messages: {lib.PROXYCCL_MOST_UNSENT} bytes are not sent", peer)
    if status == errno.ENOMEM:
        raise MemoryError("there is no memory for the message")
    raise TransferError(f"agent {peer}: {os.strerror(status)}", peer)


def wait_in_slices(wait: Callable[[int], int], pending: int, seconds: float) -> int:
    """Calls `wait` until it returns another value than `pending` or `seconds` have passed, and returns its last result.
    `wait` gets the longest time to wait in nanoseconds. The main thread calls `wait` repeatedly for a short time, so
    that signal handlers run between these calls.
    """
    deadline = time.monotonic_ns() + int(seconds * 1e9)
    longest = SLICE_MS * 1_000_000 if threading.current_thread() is threading.main_thread() else int(seconds * 1e9)
    while True:
        left = deadline - time.monotonic_ns()
        result = wait(max(0, min(left, longest)))
        if result != pending or left <= longest:
            return result
