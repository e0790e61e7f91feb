"""NIXL's exchange of metadata by sockets: an agent that listens takes, gives and forgets metadata.

It is neither encrypted nor authenticated, like NIXL's: who reaches the port gets this agent's metadata, and with it
its memory. Agents that exchange metadata by other means need no listener.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

from proxyccl.device.errors import ResourceError
from proxyccl.device.process import forks
from proxyccl.device.process.threads import Thread
from proxyccl.nixl.logging import get_logger

_HEAD = struct.Struct("<4sBQ")
_FORMAT = b"PXM1"
_LONGEST = 64 << 20
_SECONDS = 5.0  # for one exchange, and for a peer to start to listen
_MOST_AT_ONCE = 16  # exchanges of a listener; further peers wait
_PAUSE_SECONDS = 0.05
_logger = get_logger(__name__.removeprefix("proxyccl.nixl."))


class Request(IntEnum):
    """A request to a peer. INVALIDATE has metadata of the sender, which tell it from a later agent of its name."""

    LOAD = 1
    FETCH = 2
    INVALIDATE = 3


class Exchanging(Protocol):
    """The calls of an agent that the exchange needs."""

    def loadRemoteMD(self, remote_metadata: bytes) -> bytes: ...  # noqa: D102
    def getLocalMD(self) -> bytes: ...  # noqa: D102
    def forgetSender(self, metadata: bytes) -> None: ...  # noqa: D102


class Listener:
    """Serves peers until the agent is gone.

    Args:
        agent: it is not kept alive.
        port: 0: any free one.

    Raises:
        OSError: the port is taken.
    """

    def __init__(self, agent: Exchanging, port: int) -> None:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        listener = socket.create_server(("", port), family=family, backlog=64, dualstack_ipv6=dual)
        self.port: int = listener.getsockname()[1]
        forks.keep_from_children(listener)
        forks.finalizer(agent, _end, listener)
        Thread(_serve, "proxyccl-nixl-listener", listener, weakref.ref(agent)).start()


def _end(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it


def _serve(listener: socket.socket, reference: weakref.ref[Exchanging]) -> None:
    free = threading.BoundedSemaphore(_MOST_AT_ONCE)
    with listener:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                if reference() is None:
                    return
                time.sleep(_PAUSE_SECONDS)  # no descriptor is left; the peer waits
                continue
            free.acquire()
            try:
                Thread(_answer, "proxyccl-nixl-answer", connection, reference, free).start()
            except ResourceError as error:
                _logger.warning("a peer's metadata request failed: %s", error)
                connection.close()
                free.release()


def _answer(connection: socket.socket, reference: weakref.ref[Exchanging], free: threading.BoundedSemaphore) -> None:
    """Serves one request. A peer that leaves, or sends nothing valid, loses only that."""
    deadline = time.monotonic() + _SECONDS
    with connection:
        try:
            request, data = _receive(connection, deadline)
            agent = reference()
            if agent is None:
                return
            if request == Request.LOAD:
                agent.loadRemoteMD(data)
            elif request == Request.FETCH:
                _send(connection, deadline, Request.LOAD, agent.getLocalMD())
            elif request == Request.INVALIDATE:
                agent.forgetSender(data)
        except Exception as error:
            _logger.warning("a peer's metadata request failed: %s", error)
        finally:
            free.release()


class Sender:
    """Sends requests to listening peers, one after the other, in a thread of its own.

    Args:
        agent: it is not kept alive.
    """

    def __init__(self, agent: Exchanging) -> None:
        self._agent = weakref.ref(agent)
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        forks.finalizer(agent, self._requests.put, None)
        Thread(self._run, "proxyccl-nixl-sender").start()

    def send(self, address: str, port: int, request: Request, data: bytes) -> None:
        """Begins a request. A failure is logged."""
        self._requests.put(lambda: self._ask(address, port, request, data))

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            request()

    def _ask(self, address: str, port: int, request: Request, data: bytes) -> None:
        try:
            with _reach(address, port) as connection:
                deadline = time.monotonic() + _SECONDS
                _send(connection, deadline, request, data)
                if request == Request.FETCH:
                    _, metadata = _receive(connection, deadline)
                    agent = self._agent()
                    if agent is not None:
                        agent.loadRemoteMD(metadata)
                else:  # the peer closes it when it has done that; it might do the next request before it
                    _limit(connection, deadline)
                    connection.recv(1)
        except Exception as error:
            text = "metadata can't be exchanged with %s port %s: %s"
            _logger.error(text, address, port, error)  # noqa: TRY400  a peer's failure, not this code's


def _reach(address: str, port: int) -> socket.socket:
    """A connection to a peer, which may not listen yet."""
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            return socket.create_connection((address, port), _SECONDS)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


def _send(connection: socket.socket, deadline: float, request: Request, data: bytes) -> None:
    _limit(connection, deadline)
    connection.sendall(_HEAD.pack(_FORMAT, request, len(data)) + data)


def _receive(connection: socket.socket, deadline: float) -> tuple[int, bytes]:
    name, request, length = _HEAD.unpack(_exactly(connection, deadline, _HEAD.size))
    if name != _FORMAT or length > _LONGEST:
        raise OSError("the peer sent an invalid request")
    return request, _exactly(connection, deadline, length)


def _exactly(connection: socket.socket, deadline: float, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        _limit(connection, deadline)
        part = connection.recv(min(length - len(data), 1 << 20))
        if not part:
            raise OSError("the peer has closed the connection")
        data += part
    return bytes(data)


def _limit(connection: socket.socket, deadline: float) -> None:
    """Bounds the next call by a deadline, of `time.monotonic`."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"the exchange took more than {_SECONDS:g} s")
    connection.settimeout(left)
