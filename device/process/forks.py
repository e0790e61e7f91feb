"""Ownership by one process: a fork's child has copies of its parent's objects, but not its threads or its role.

In the child, using such an object raises ClosedError, and its finalizer does nothing. The child may make its own
objects.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct, field

from proxyccl.device.errors import ClosedError


class Process(Struct, frozen=True, eq=False):
    """A process that makes objects. There is one instance in each process (`here`).

    Attributes:
        pid: the process id, which the system may reuse for a later process.
        token: 16 bytes that no other process has.
    """

    pid: int = field(default_factory=os.getpid)
    token: bytes = field(default_factory=lambda: os.urandom(16))

    @property
    def is_here(self) -> bool:
        """Whether this is the calling process, and not an ancestor that forked it."""
        return self is _here

    def require(self, owned: str) -> None:
        """Raises ClosedError, which names the fork, in any process other than this one. `owned` names the object in the
        error."""
        if self is not _here:
            raise ClosedError(self.refusal(owned))

    def refusal(self, owned: str) -> str:
        """Returns the error text for another process that uses this process's objects."""
        return (
            f"{owned} belongs to process {self.pid}; this process, {_here.pid}, is a fork of it and must make its own"
        )


_here = Process()
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def here() -> Process:
    """Returns the calling process, for an object to remember as its maker."""
    return _here


def finalizer(owner: Any, release: Callable[..., Any], *arguments: Any) -> weakref.finalize[..., Any]:
    """Returns a `weakref.finalize` that runs only in the process that made it.

    The finalizer does not run at exit, because communicators are closed later.
    """
    made = weakref.finalize(owner, _release, _here, release, arguments)
    made.atexit = False
    return made


def _release(process: Process, release: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if process.is_here:
        release(*arguments)


def keep_from_children(connection: socket.socket) -> None:
    """Closes a socket in forks' children: otherwise the process at its other end would not learn that this process has
    ended."""
    _sockets.add(connection)


class _Lock(Protocol):
    def acquire(self) -> bool: ...
    def release(self) -> None: ...


def hold_while_forking(lock: _Lock) -> None:
    """Makes forks wait until a lock is free, because the child lacks the thread that would release it. The lock must be
    held only briefly."""
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


def _begin() -> None:
    global _here  # noqa: PLW0603  the process that this module's objects are made in
    _here = Process()
    for connection in list(_sockets):
        connection.close()  # the socket is closed but not shut down, because the parent still uses it


os.register_at_fork(after_in_child=_begin)
