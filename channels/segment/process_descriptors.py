"""Descriptors of other processes (pidfd_open(2)), one for each process, shared by all that watch it."""

from __future__ import annotations

import os
import select
import threading

from proxyccl.device import forks

_lock = threading.Lock()
forks.hold_while_forking(_lock)
_of_process: dict[int, int] = {}
_users: dict[int, int] = {}


def acquire(pid: int) -> int:
    """A descriptor that becomes readable when the process ends. Each call is paired with a `release`.

    Raises:
        ProcessLookupError: there is no such process.
    """
    with _lock:
        descriptor = _of_process.get(pid)
        if descriptor is None or has_ended(descriptor):  # then the number may be another process's
            descriptor = _of_process[pid] = os.pidfd_open(pid)
        _users[descriptor] = _users.get(descriptor, 0) + 1
        return descriptor


def has_ended(descriptor: int) -> bool:
    """Whether a descriptor's process has ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def release(descriptor: int) -> None:
    """Closes a descriptor after its last user."""
    with _lock:
        _users[descriptor] -= 1
        if _users[descriptor]:
            return
        del _users[descriptor]
        for pid in [pid for pid, known in _of_process.items() if known == descriptor]:
            del _of_process[pid]
        os.close(descriptor)
