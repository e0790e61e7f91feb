"""Where a daemon listens: a socket file of its user's, or a socket that a rank has bound and handed over."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import Protocol

from proxyccl.device.errors import ArgumentError, ResourceError

BACKLOG = 512


class Listener(Protocol):
    """A listening socket.

    Attributes:
        socket: accepts clients.
        name: how reports and logs name it.
    """

    socket: socket.socket
    name: str

    def close(self) -> None:
        """Refuses clients from now on."""
        ...

    def release(self) -> None:
        """Lets another daemon listen there."""
        ...


class SocketFile:
    """A socket in the file system. A lock beside it tells a live daemon from the socket that a dead one left.

    Raises:
        ArgumentError: other users can write to the directory, or the path names a file that is no socket.
        ResourceError: another daemon listens there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = str(path)
        _make_private(path.parent)
        self._lock_file = _lock_beside(path)
        try:
            self.socket = _listen(path)
        except ArgumentError:
            self.release()
            raise

    def close(self) -> None:
        """Removes the socket."""
        self.socket.close()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def release(self) -> None:
        """Gives the lock back."""
        os.close(self._lock_file)


class HandedOver:
    """A socket that another process has bound to an abstract name, which needs no file and no lock."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # no process that this one starts may keep the name
        self.socket = socket.socket(fileno=descriptor)
        self.name = shown(self.socket.getsockname())

    def close(self) -> None:
        """Frees the name."""
        self.socket.close()

    def release(self) -> None:
        """Does nothing: the name went with the socket."""


def abstract(name: str) -> str:
    """The address of a socket of this name that is no file: it goes with the last process that holds the socket."""
    return f"\0{name}"


def shown(address: str | bytes) -> str:
    """An address as people write it, with an @ for the zero byte of an abstract one."""
    return os.fsdecode(address).replace("\0", "@")


def _make_private(directory: Path) -> None:
    """Makes the socket's directory if there is none, and refuses one that other users can write to."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        info = directory.stat()
    except OSError as error:
        raise ArgumentError("socket", f"cannot make its directory: {error}") from None
    shared = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if info.st_uid not in (0, os.geteuid()) or (shared and not info.st_mode & stat.S_ISVTX):
        raise ArgumentError(
            "socket", f"other users can write to {directory}; expected a directory that only this user can write to"
        )


def _lock_beside(path: Path) -> int:
    """Locks a file beside the socket until this process ends. A socket without a lock was left by a killed daemon."""
    name = path.with_name(path.name + ".lock")
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ArgumentError("socket", f"cannot lock {name}: {error}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ResourceError(f"another node daemon listens at {path}; stop it, or name another --socket") from None
    return descriptor


def _listen(path: Path) -> socket.socket:
    if path.exists() or path.is_symlink():
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ArgumentError("socket", f"{path} exists and is no socket; expected a free path")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ArgumentError("socket", f"cannot listen at {path}: {error}") from None
    finally:
        os.umask(before)
    return listener
