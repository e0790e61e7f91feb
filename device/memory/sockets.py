"""The sockets by which clients connect to a process's descriptor server (descriptor_server.py), also across containers.

In one network namespace, the socket has an abstract name. Across network namespaces, the socket is a file in a shared
directory: ``PROXYCCL_SOCKETS``, else the user's runtime directory. If two processes share only the node daemon's
socket, the daemon connects them (proxy/daemon/introductions.py).
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
"""Connects to a process's server, given the process's token and a time-out in seconds. Raises OSError."""

_brokers: dict[str, Connect] = {}


class UnreachableError(ConnectionRefusedError):
    """A process has ended, or its container shares no socket with this process's container."""


def directory() -> Path:
    """Returns the directory of sockets. The directory need not exist."""
    named = os.environ.get("PROXYCCL_SOCKETS")
    return Path(named).absolute() if named else runtime_directory()


def usable_directory() -> tuple[str, str]:
    """Returns an identifier of the directory of sockets and "", or, if this process can't use the directory, "" and the
    reason.

    The identifier is the same in all processes that see the directory. The user's runtime directory is made if it is
    missing.
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
    """Returns an identifier of this process's network namespace; "" if /proc does not show the namespace."""
    number = network_namespace()
    return f"network {number}" if number else ""


def listen_in_network(token: bytes) -> socket.socket:
    """Returns a socket that listens at the abstract name for a process's token. Raises OSError."""
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(_socket())
        listener.bind(_abstract(token))
        listener.listen(64)
        undo.pop_all()
    return listener


def listen_in_directory(place: Path, token: bytes) -> tuple[socket.socket, str]:
    """Returns a socket that listens at a file for a process's token, and the file's path. Raises OSError."""
    _remove_left(place)
    path = _path(place, token)
    draft = os.path.join(place, f".{os.path.basename(path)[:8]}")
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(_socket())
        listener.bind(draft)
        undo.callback(os.unlink, draft)
        os.chmod(draft, 0o600)
        listener.listen(64)
        os.rename(draft, path)  # another process's `_remove_left` removes a socket that does not listen
        undo.pop_all()
    return listener, path


def _remove_left(place: Path) -> None:
    for path in place.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(OSError), _socket() as probe:
            if not stat.S_ISSOCK(path.lstat().st_mode):
                continue
            probe.setblocking(False)  # BlockingIOError means that a busy process listens
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
    return len(os.fsencode(_path(place, bytes(TOKEN_BYTES)))) <= _LONGEST_PATH


def _path(place: Path, token: bytes) -> str:
    return os.path.join(place, token.hex() + _SUFFIX)


def add_broker(name: str, connect: Connect) -> None:
    """Registers a broker: a process through which this process connects to processes that share no socket with it.

    Args:
        name: the broker's name in errors. The new broker replaces an earlier broker of the same name.
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
        timeout: seconds for each attempt.

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
    """Returns process id and user id of a connection's other end, from the kernel. The process id is 0 if the process
    is not visible in this PID namespace."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user
