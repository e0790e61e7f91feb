"""Descriptors of other processes (pidfd_open(2)). All watchers in this process share one descriptor per watched
process. A process in another PID namespace can't be opened by its number, so such a process opens a descriptor of
itself and passes the descriptor over a socket.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator

from proxyccl.device.errors import ResourceError
from proxyccl.device.memory.descriptor_server import fetch_descriptor, supply
from proxyccl.device.memory.descriptors import EXHAUSTED
from proxyccl.device.memory.sockets import UnreachableError
from proxyccl.device.process import forks
from proxyccl.device.process.namespaces import proc_view
from proxyccl.proxy.codec import Message, Uint64
from proxyccl.proxy.processes import start_of

_KIND = b"p"
_lock = threading.Lock()
forks.hold_while_forking(_lock)
_of_process: dict[PeerProcess, int] = {}
_users: dict[int, int] = {}


class PeerProcess(Message, frozen=True):
    """Identifies a process of this machine, also in messages between ranks."""

    pid: int  # the process's number in its PID namespace
    view: Uint64  # its `proc_view`
    token: bytes  # 16 bytes that no other process has
    # The process's start time (`start_of`), None if unknown. The start time distinguishes the process from a later
    # process with the same number.
    started: int | None = None

    @classmethod
    def own(cls) -> PeerProcess:
        return cls(os.getpid(), proc_view(), forks.here().token, start_of(os.getpid()))

    @property
    def is_here(self) -> bool:
        return self.token == forks.here().token

    @property
    def is_visible(self) -> bool:
        """Whether `pid` is the process's number in this PID namespace."""
        return self.view != 0 and self.view == proc_view()

    @property
    def is_ending(self) -> bool:
        """Whether the process's main thread has ended, so that the process's files can't be opened. The process's
        descriptor becomes readable when all threads have ended, which on a busy machine may take another second or
        more.
        """
        return self.is_visible and self.started is not None and start_of(self.pid) != self.started


def acquire(process: PeerProcess) -> int:
    """Returns a descriptor that becomes readable when the process ends. Each call needs a matching `release`.

    Raises:
        ProcessLookupError: the process has ended.
        ResourceError: the system forbids process descriptors, or a process in another PID namespace does not pass its
            descriptor.
    """
    with _lock:
        descriptor = _of_process.get(process)
        if descriptor is None or has_ended(descriptor):  # the number may belong to another process
            descriptor = _of_process[process] = _open(process)
        _users[descriptor] = _users.get(descriptor, 0) + 1
        return descriptor


def _open(process: PeerProcess) -> int:
    if process.is_visible:
        try:
            descriptor = os.pidfd_open(process.pid)
        except OSError as error:
            if isinstance(error, ProcessLookupError) or error.errno in EXHAUSTED:
                raise
            raise ResourceError(
                f"process {process.pid} can't be watched: pidfd_open: {error.strerror} (seccomp, or an old kernel)"
            ) from None
        if process.started is not None and start_of(process.pid, zombies=True) != process.started:
            os.close(descriptor)
            raise ProcessLookupError(f"process {process.pid} has ended")
        return descriptor
    try:
        return fetch_descriptor(process.token, _KIND)
    except UnreachableError as error:  # the process's socket is gone
        raise ProcessLookupError(str(error)) from None
    except OSError as error:
        raise ResourceError(f"process {process.pid} of another PID namespace can't be watched: {error}") from None


def _supply(_: bytes) -> Iterator[tuple[int, int]]:
    yield 0, os.pidfd_open(os.getpid())


supply(_KIND, _supply, ())


def has_ended(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def release(descriptor: int) -> None:
    with _lock:
        _users[descriptor] -= 1
        if _users[descriptor]:
            return
        del _users[descriptor]
        for process in [process for process, known in _of_process.items() if known == descriptor]:
            del _of_process[process]
        os.close(descriptor)
