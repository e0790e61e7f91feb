"""The two kinds of a daemon's listening socket: its user's socket file, or a socket that a rank bound and passed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import TypeAlias

from proxyccl.device.errors import ArgumentError, ResourceError, UntrustedPathError
from proxyccl.device.process.private_directories import open_private

BACKLOG = 512


class SocketFile:
    """A listening socket in the file system, and its name in reports and logs. A lock file beside the socket shows
    whether a daemon is alive or a dead daemon left the socket.

    Raises:
        ArgumentError: the directory can't be created, or the path names a file that is not a socket.
        UntrustedPathError: the directory is a link or writable for other users (even if it is sticky), or the socket or
            its lock belongs to another user.
        ResourceError: another daemon listens at the path.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = str(path)
        with contextlib.ExitStack() as undo:
            directory = _open_directory(path.parent)
            undo.callback(os.close, directory)
            self._lock_file = _lock_beside(path, directory)
            try:
                self.socket = _listen(path, directory)
            except ArgumentError:
                self.release()
                raise

    def close(self) -> None:
        self.socket.close()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def release(self) -> None:
        os.close(self._lock_file)


class HandedOver:
    """A listening socket that another process has bound to an abstract name, which needs no file and no lock."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)  # a child process with this descriptor would keep the name in use
        self.socket = socket.socket(fileno=descriptor)
        self.name = shown(self.socket.getsockname())

    def close(self) -> None:
        self.socket.close()

    def release(self) -> None:
        """Does nothing, because the name was freed with the socket."""


Listener: TypeAlias = SocketFile | HandedOver


def abstract(name: str) -> str:
    """Returns the abstract socket address for a name, which lasts until no process holds the socket."""
    return f"\0{name}"


def shown(address: str | bytes) -> str:
    """Returns a readable text for an address, with @ for the zero byte of an abstract address."""
    return os.fsdecode(address).replace("\0", "@")


def _open_directory(directory: Path) -> int:
    try:
        if not os.path.lexists(directory):
            directory.mkdir(mode=0o700, exist_ok=True)
        return open_private(directory, "socket")
    except OSError as error:
        raise ArgumentError("socket", f"cannot make the socket's directory: {error}") from None


def _require_own(info: os.stat_result, path: Path) -> None:
    """Raises UntrustedPathError if a file belongs to another user, who may have made it in an open directory."""
    if info.st_uid not in (0, os.geteuid()):
        reason = f"{path} belongs to user {info.st_uid}; remove it, or name another --socket"
        raise UntrustedPathError("socket", reason)


def _require_file(info: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(info.st_mode):
        raise ArgumentError("socket", f"{path} is not a regular file; remove it, or name another --socket")


def _lock_beside(path: Path, directory: int) -> int:
    """Locks a file beside the socket until this process ends. If no process holds the lock, the socket was left by a
    killed daemon. Returns the lock file's descriptor. `directory` is a descriptor of the socket's directory.
    """
    name = path.with_name(path.name + ".lock")
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(name.name, flags, 0o600, dir_fd=directory)
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):  # raises UntrustedPathError if the file has another owner
            _require_own(os.stat(name.name, dir_fd=directory, follow_symlinks=False), name)
        if error.errno == errno.ELOOP:
            raise UntrustedPathError("socket", f"{name} is a link; remove it, or name another --socket") from None
        raise ArgumentError("socket", f"cannot lock {name}: {error}") from None
    try:
        info = os.fstat(descriptor)
        _require_own(info, name)
        _require_file(info, name)
        if info.st_uid == os.geteuid():
            os.fchmod(descriptor, 0o600)  # only this user can open and lock the file
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ResourceError(f"another node daemon listens at {path}; stop it, or name another --socket") from None
    except ArgumentError:
        os.close(descriptor)
        raise
    return descriptor


def _listen(path: Path, directory: int) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        info = os.stat(path.name, dir_fd=directory, follow_symlinks=False)
        _require_own(info, path)
        if not stat.S_ISSOCK(info.st_mode):
            raise ArgumentError("socket", f"{path} exists and is not a socket; expected a free path")
        os.unlink(path.name, dir_fd=directory)
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
