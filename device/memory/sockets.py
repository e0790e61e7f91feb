"""The sockets through which clients reach a process's descriptor server (descriptor_server.py), also from containers.

Processes of one network namespace use an abstract name, which needs no file. Processes of different network namespaces
use a file in a directory that both see: ``PROXYCCL_SOCKETS``, else the user's runtime directory. If they share only the
node daemon's socket, the daemon connects them (proxy/daemon/broker.py).
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from proxyccl.device.process import forks
from proxyccl.device.process.namespaces import network_namespace
from proxyccl.device.process.user_directories import runtime_directory

TOKEN_BYTES = 16
_SUFFIX = ".descriptors"
_LONGEST_PATH = 107
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid

Connect = Callable[[bytes, float], socket.socket]
"""Connects to the server of a process, by the process's token and a time-out in seconds. Raises OSError."""

_brokers: dict[str, Connect] = {}


class UnreachableError(ConnectionRefusedError):
    """A process can't be reached: it has ended, or its container shares no socket with this process's container."""


def directory() -> Path:
    """Returns the directory of sockets, which need not exist."""
    named = os.environ.get("PROXYCCL_SOCKETS")
    return Path(named).absolute() if named else runtime_directory()


def usable_directory() -> tuple[str, str]:
    """Returns two texts, one of which is "": a text that is the same in all processes with the same directory of
    sockets, and the reason if this process can't use the directory.

    The user's runtime directory is made if it is missing.
    """
    place = directory()
    try:
        if not os.environ.get("PROXYCCL_SOCKETS"):
            with contextlib.suppress(FileExistsError):
                place.mkdir(mode=0o700)
        info = place.stat()
    except OSError as error:
        return "", f"{place}: {error.strerror}"
    if not stat.S_ISDIR(info.st_mode):
        return "", f"{place} is not a directory"
    if not os.access(place, os.W_OK | os.X_OK):
        return "", f"{place} can't be written"
    if not _fits(place):
        return "", f"{place} is too long for the path of a socket in it"
    return f"directory {info.st_dev}:{info.st_ino}", ""


def shared_network() -> str:
    """Returns a text that is the same in all processes of one network namespace; "" if /proc does not show the
    namespace."""
    number = network_namespace()
    return f"network {number}" if number else ""


def listen_in_network(token: bytes) -> socket.socket:
    """Returns a socket that listens at a process's abstract name. Raises OSError."""
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(_socket())
        listener.bind(_abstract(token))
        listener.listen(64)
        undo.pop_all()
    return listener


def listen_in_directory(place: Path, token: bytes) -> tuple[socket.socket, str]:
    """Returns a socket that listens at a process's file in a directory, and the file's path. Raises OSError."""
    _remove_left(place)
    path = _path(place, token)
    draft = os.path.join(place, f".{os.path.basename(path)[:8]}")
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(_socket())
        listener.bind(draft)
        undo.callback(os.unlink, draft)
        os.chmod(draft, 0o600)
        listener.listen(64)
        os.rename(draft, path)  # renamed once it listens: `_remove_left` removes sockets that don't
        undo.pop_all()
    return listener, path


def _remove_left(place: Path) -> None:
    """Removes the files of processes that were killed."""
    for path in place.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError), _socket() as probe:
            if not stat.S_ISSOCK(path.lstat().st_mode):
                continue
            probe.setblocking(False)  # BlockingIOError means that the process is alive and busy
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                path.unlink()


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    forks.keep_from_children(made)
    return made


def _abstract(token: bytes) -> bytes:
    return b"\0proxyccl-" + token.hex().encode()


def _fits(place: Path) -> bool:
    """Whether the path of a socket in this directory is short enough."""
    return len(os.fsencode(_path(place, bytes(TOKEN_BYTES)))) <= _LONGEST_PATH


def _path(place: Path, token: bytes) -> str:
    return os.path.join(place, token.hex() + _SUFFIX)


def add_broker(name: str, connect: Connect) -> None:
    """Registers a broker, which is a process that connects other processes, for processes that no other socket reaches.

    Args:
        name: the broker's name in errors. It replaces a broker of the same name.
        connect: connects to a process through the broker. Raises OSError if the broker does not know the process.
    """
    _brokers[name] = connect


def remove_broker(name: str) -> None:
    """Ends `add_broker`."""
    _brokers.pop(name, None)


def connect(token: bytes, timeout: float) -> socket.socket:
    """Connects to the server of a process.

    Args:
        token: the process's token.
        timeout: seconds for each step.

    Raises:
        UnreachableError: the process can't be reached.
        PermissionError: the process belongs to another user.
        OSError: the process does not answer.
    """
    tried = []
    for name, way in _ways(token):
        try:
            return way(timeout)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
            tried.append(f"not {name}" + (f" ({error})" if isinstance(error, UnreachableError) else ""))
    raise UnreachableError(f"its process has ended, or can't be reached from this container: {', '.join(tried)}")


def _ways(token: bytes) -> Iterator[tuple[str, Callable[[float], socket.socket]]]:
    """Yields functions that connect to a process's server, each after the name that errors give it."""
    yield "in this network namespace", lambda timeout: _connect(_abstract(token), timeout)
    place = directory()
    if _fits(place):
        yield f"in {place}", lambda timeout: _connect(_path(place, token), timeout)
    for name, broker in tuple(_brokers.items()):
        yield f"at {name}", lambda timeout, broker=broker: broker(token, timeout)  # type: ignore[misc]


def _connect(address: str | bytes, timeout: float) -> socket.socket:
    connection = _socket()
    try:
        connection.settimeout(timeout)
        connection.connect(address)
        _, user = peer_credentials(connection)
        if user not in (0, os.geteuid()):
            raise PermissionError(f"its process belongs to user {user}, not to {os.geteuid()}")
    except OSError:
        connection.close()
        raise
    return connection


def peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Returns the process id and user id at the other end, from the kernel. The process id is 0 if the process has no
    number in this PID namespace."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user
