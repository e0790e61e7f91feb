"""Hands file descriptors to other processes of this machine: some drivers share memory by descriptor.

A descriptor can't travel in bytes, so the handle that ranks exchange names a server: a thread of the process that owns
the memory, at a Unix socket with a random name that only the handle contains. It makes descriptors on request and
does not keep them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator

from proxyccl.device import forks
from proxyccl.device.memory.descriptor_passing import receive_with_descriptors, send_with_descriptors
from proxyccl.device.memory.descriptors import EXHAUSTED, naming_exhaustion
from proxyccl.device.threads import Thread

NAME_BYTES = 16
_TIMEOUT = 10.0
_PAUSE_SECONDS = 0.01
_REQUEST_SECONDS = 2.0  # a client asks at once; a stopped one holds up the others no longer than this
_LONGEST_REQUEST = 256
_PART = struct.Struct("<Q")

Supply = Callable[[bytes], Iterator[tuple[int, int]]]
"""Makes (number, descriptor) pairs for a request; the server closes the descriptors. It raises for a request that it
can't serve."""


def _address(name: bytes) -> bytes:
    return b"\0proxyccl-" + name.hex().encode()


class DescriptorServer:
    """Serves descriptors for the life of the process, to processes of the same user.

    Args:
        supply: called in the server's thread.
        failures: the exceptions that it raises for a request that can't be served, such as one for memory that is gone.
    """

    def __init__(self, supply: Supply, failures: tuple[type[Exception], ...]) -> None:
        self.name = os.urandom(NAME_BYTES)
        self._supply = supply
        self._failures = failures
        with naming_exhaustion("the server of descriptors of memory"):
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        forks.keep_from_children(self._socket)
        self._socket.bind(_address(self.name))
        self._socket.listen(64)
        Thread(self._run, "proxyccl-descriptors").start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if error.errno not in EXHAUSTED:
                    raise
                time.sleep(_PAUSE_SECONDS)  # the client waits, and may succeed when something is closed
                continue
            # A client that leaves, or does not read, loses only its own answer.
            with connection, contextlib.suppress(OSError):
                connection.settimeout(_REQUEST_SECONDS)
                self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, user, _ = struct.unpack("3i", credentials)
        if user not in (0, os.geteuid()):
            return
        request = connection.recv(_LONGEST_REQUEST)
        try:
            for number, descriptor in self._supply(request):
                try:
                    send_with_descriptors(connection, _PART.pack(number), [descriptor])
                finally:
                    os.close(descriptor)
        except self._failures as error:
            _refuse(connection, error)
        except OSError as error:
            if error.errno not in EXHAUSTED:  # the client's end
                raise
            _refuse(connection, error)


def _refuse(connection: socket.socket, error: Exception) -> None:
    connection.send(_PART.pack(0) + (str(error) or repr(error)).encode()[:_LONGEST_REQUEST])


def fetch_descriptors(name: bytes, request: bytes) -> list[tuple[int, int]]:
    """The descriptors that the server of that name supplies for a request. The caller closes them.

    Raises:
        OSError: its process is gone, belongs to another user, has not answered within 10 s, or can't serve the request.
    """
    deadline = time.monotonic() + _TIMEOUT
    parts: list[tuple[int, int]] = []
    refusal = b""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_TIMEOUT)
            connection.connect(_address(name))
            connection.send(request)
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


def _close(parts: list[tuple[int, int]]) -> None:
    for _, descriptor in parts:
        os.close(descriptor)
