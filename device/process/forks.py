"""Makes objects usable only in the process that made them: a fork's child copies objects without their threads.

In the child, using an inherited object raises ClosedError, and its finalizer does nothing. The child may make its own
objects.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct, field

from proxyccl.device.errors import ClosedError


class Process(Struct, frozen=True, eq=False):
    """The identity of a process. `here` returns the process's only instance."""

    pid: int = field(default_factory=os.getpid)  # the process id, which the system may reuse
    token: bytes = field(default_factory=lambda: os.urandom(16))  # 16 random bytes, which are unique

    @property
    def is_here(self) -> bool:
        """Whether this is the calling process, and not its parent before a fork."""
        return self is _here

    def require(self, owned: str) -> None:
        """Raises ClosedError if the calling process is a fork of this process. `owned` names the object in errors."""
        if self is not _here:
            raise ClosedError(self.refusal(owned))

    def refusal(self, owned: str) -> str:
        """Returns the error text for a fork's child that uses this process's object `owned`."""
        return (
            f"{owned} belongs to process {self.pid}; this process, {_here.pid}, is a fork of it and must make its own"
        )


class _Closable(Protocol):
    def close(self) -> None: ...


_here = Process()
_kept: weakref.WeakSet[_Closable] = weakref.WeakSet()


def here() -> Process:
    """Returns the calling process."""
    return _here


def finalizer(owner: Any, release: Callable[..., Any], *arguments: Any) -> weakref.finalize[..., Any]:
    """Returns a `weakref.finalize` that does nothing in forks' children.

    The finalizer does not run at exit, because communicators are closed later.
    """
    made = weakref.finalize(owner, _release, _here, release, arguments)
    made.atexit = False
    return made


def _release(process: Process, release: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if process.is_here:
        release(*arguments)


def keep_from_children(file: _Closable) -> None:
    """Closes a socket or a locked file in forked children, which would hide the end of this process from others."""
    _kept.add(file)


class _Lock(Protocol):
    def acquire(self) -> bool: ...
    def release(self) -> None: ...


def hold_while_forking(lock: _Lock) -> None:
    """Makes forks wait for a lock, because the child would lack the thread that holds it. Hold the lock briefly."""
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


def _begin() -> None:
    global _here  # noqa: PLW0603
    _here = Process()
    files = list(_kept)
    _kept.clear()  # a fork of this child must not close descriptors that have got these numbers since
    for file in files:
        file.close()  # a socket is not shut down, because the parent still uses the socket


os.register_at_fork(after_in_child=_begin)
