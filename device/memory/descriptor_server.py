"""Sends file descriptors of memory to other processes of this machine.

Ranks exchange handles as bytes, which can't contain a descriptor. So a handle contains the token of the process that
owns the memory. A thread of that process, the server, makes descriptors on request. Clients connect to the server by
the process's token, through a socket that both processes can access (`sockets.py`).
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

from proxyccl.device.memory import sockets
from proxyccl.device.memory.descriptors import (
    EXHAUSTED,
    naming_exhaustion,
    receive_with_descriptors,
    send_with_descriptors,
)
from proxyccl.device.process import forks
from proxyccl.device.process.threads import Thread

_TIMEOUT = 10.0
_PAUSE_SECONDS = 0.01
_REQUEST_SECONDS = 2.0  # clients send their request right after connecting
_LONGEST_REQUEST = 256
_PART = struct.Struct("<Q")

Supply = Callable[[bytes], Iterator[tuple[int, int]]]
"""Yields pairs of a number and a descriptor for a request, or raises. The server closes the descriptors."""

_supplies: dict[bytes, tuple[Supply, tuple[type[Exception], ...]]] = {}
_lock = threading.Lock()
forks.hold_while_forking(_lock)


def supply(kind: bytes, make: Supply, failures: tuple[type[Exception], ...]) -> None:
    """Registers a function that makes descriptors for requests to this process's server.

    Args:
        kind: the first byte of the requests.
        make: the function, which a thread of the server calls with the rest of the request.
        failures: the exceptions by which `make` refuses a request, for example because the memory was freed.
    """
    _supplies[kind] = make, failures


class DescriptorServer:
    """This process's server, which `serve` returns, for processes of the same user."""

    def __init__(self) -> None:
        self.process = forks.here()
        self._directory: str | None = None
        with contextlib.ExitStack() as undo, naming_exhaustion("the server of descriptors of memory"):
            self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            for descriptor in (self._wake_read, self._wake_write):
                undo.callback(os.close, descriptor)
            self._listeners = [undo.enter_context(sockets.listen_in_network(self.process.token))]
            self._listeners[0].setblocking(False)
            Thread(self._run, "proxyccl-descriptors").start()
            undo.pop_all()

    def listen_in_directory(self) -> None:
        """Also accepts clients from other network namespaces, by a socket in `sockets.directory()`.

        Raises:
            OSError: no socket can be made in the directory.
        """
        with _lock:
            directory = sockets.directory()
            if self._directory == os.fspath(directory):
                return
            with naming_exhaustion("the socket of descriptors of memory"):
                listener, path = sockets.listen_in_directory(directory, self.process.token)
            listener.setblocking(False)
            self._directory = os.fspath(directory)
            _left_files.append((self.process, path))
            self._listeners.append(listener)
        os.write(self._wake_write, b"x")

    def _run(self) -> None:
        while True:
            with _lock:
                listeners = {listener.fileno(): listener for listener in self._listeners}
            poll = select.poll()
            for descriptor in (self._wake_read, *listeners):
                poll.register(descriptor, select.POLLIN)
            for descriptor, _ in poll.poll():
                if descriptor == self._wake_read:
                    os.read(self._wake_read, 64)
                else:
                    self._accept(listeners[descriptor])

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:  # the client has disconnected
            return
        except OSError:
            time.sleep(_PAUSE_SECONDS)  # keeps the client waiting until descriptors or memory are free again
            return
        self.answer(connection)

    def answer(self, connection: socket.socket) -> None:
        """Serves one client and closes its connection. Any thread may call this method."""
        # Errors of the connection are ignored, because they affect only this client.
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_REQUEST_SECONDS)
            self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        _, user = sockets.peer_credentials(connection)
        request = connection.recv(_LONGEST_REQUEST)
        if user not in (0, os.geteuid()):
            _refuse(connection, f"it belongs to user {os.geteuid()}, not to {user}")
            return
        make, failures = _supplies.get(request[:1], (None, ()))
        if make is None:
            _refuse(connection, f"it has no descriptors of kind {request[:1]!r}")
            return
        try:
            for number, descriptor in make(request[1:]):
                try:
                    send_with_descriptors(connection, _PART.pack(number), [descriptor])
                finally:
                    os.close(descriptor)
        except failures as error:
            _refuse(connection, str(error) or repr(error))
        except OSError as error:
            if error.errno not in EXHAUSTED:  # the client has disconnected
                raise
            _refuse(connection, str(error))


def _refuse(connection: socket.socket, reason: str) -> None:
    connection.send(_PART.pack(0) + reason.encode()[:_LONGEST_REQUEST])


_server: DescriptorServer | None = None
_left_files: list[tuple[forks.Process, str]] = []


def serve() -> DescriptorServer:
    """Returns this process's server, which the first call starts.

    Raises:
        ResourceError: no descriptor or thread is left.
    """
    global _server  # noqa: PLW0603  a process has one server
    with _lock:
        if _server is None or not _server.process.is_here:
            _server = DescriptorServer()
        return _server


@atexit.register  # communicators' exit handlers are registered later, and so run earlier
def _remove_files() -> None:
    for process, path in _left_files:
        if process.is_here:
            with contextlib.suppress(OSError):
                os.unlink(path)


def fetch_descriptors(token: bytes, kind: bytes, request: bytes) -> list[tuple[int, int]]:
    """Returns the (number, descriptor) pairs that a process's server makes for a request. The caller closes the
    descriptors.

    Args:
        token: the process's token.
        kind: the first byte of the request (`supply`).
        request: the rest of the request.

    Raises:
        UnreachableError: the process has ended, or its server has no socket that this process can access.
        OSError: the process belongs to another user, does not answer within 10 s, or refuses the request.
    """
    deadline = time.monotonic() + _TIMEOUT
    parts: list[tuple[int, int]] = []
    refusal = b""
    try:
        with sockets.connect(token, _TIMEOUT) as connection:
            connection.send(kind + request)
            while not refusal:
                connection.settimeout(max(1e-3, deadline - time.monotonic()))
                data, descriptors, _ = receive_with_descriptors(connection, _PART.size + _LONGEST_REQUEST, 1)
                if not data:
                    return parts
                parts += [(_PART.unpack_from(data)[0], descriptor) for descriptor in descriptors]
                refusal = data[_PART.size :]
    except OSError:
        _close(parts)
        raise
    _close(parts)
    raise OSError(refusal.decode(errors="replace"))


def fetch_descriptor(token: bytes, kind: bytes, request: bytes = b"") -> int:
    """Returns the only descriptor that a process's server makes for a request. Raises OSError like
    `fetch_descriptors`."""
    parts = fetch_descriptors(token, kind, request)
    if len(parts) != 1:
        _close(parts)
        raise OSError("the owner ended before it answered" if not parts else f"the owner sent {len(parts)} descriptors")
    return parts[0][1]


def _close(parts: list[tuple[int, int]]) -> None:
    for _, descriptor in parts:
        os.close(descriptor)
