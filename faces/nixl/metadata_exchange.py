"""NIXL's exchange of metadata by sockets: peers ask a listening agent to add, send or forget metadata.

Like NIXL's exchange, it is neither encrypted nor authenticated: whoever reaches the port can fetch this agent's
metadata, which give access to its memory. Agents that exchange metadata by other means need no listener.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import selectors
import socket
import struct
import time
import weakref
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

from proxyccl.device.process import forks
from proxyccl.device.process.threads import Thread
from proxyccl.nixl.logging import get_logger
from proxyccl.proxy.connecting import NoAddressError, connect_to_any

_HEAD = struct.Struct("<4sBQ")
_FORMAT = b"PXM1"
_LONGEST = 64 << 20
_SECONDS = 5.0  # the bound of one exchange, and of the wait for a peer to listen
_MOST_AT_ONCE = 256  # exchanges in progress; a further one replaces the oldest
_PART = 1 << 20
_PAUSE_SECONDS = 0.05
_logger = get_logger(__name__.removeprefix("proxyccl.nixl."))


class Request(IntEnum):
    """A request to a peer. INVALIDATE carries the sender's metadata, which distinguish the sender from a later agent of
    the same name.
    """

    LOAD = 1
    FETCH = 2
    INVALIDATE = 3


class Exchanging(Protocol):
    """The calls of an agent that the exchange needs."""

    def loadRemoteMD(self, remote_metadata: bytes) -> bytes: ...
    def getLocalMD(self) -> bytes: ...
    def forgetSender(self, metadata: bytes) -> None: ...


def listen(agent: Exchanging, port: int) -> None:
    """Serves peers at a port (0 for any free one) until the agent is gone. This does not keep the agent alive.

    Raises:
        OSError: the port is taken.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    listener = socket.create_server(("", port), family=family, backlog=64, dualstack_ipv6=dual)
    forks.keep_from_children(listener)
    forks.finalizer(agent, _end, listener)
    Thread(_Server(listener, weakref.ref(agent)).run, "proxyccl-nixl-listener").start()


def _end(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the listener's thread, which closes the socket


class _Exchange:
    """The state of one peer's request: the bytes received so far, then the part of the answer that is not sent yet. No
    method waits.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.deadline = time.monotonic() + _SECONDS
        self._received = bytearray()
        self._answer: memoryview | None = None

    def proceed(self, reference: weakref.ref[Exchanging]) -> int:
        """Receives or sends as much as is possible without waiting. Returns the event to wait for, or 0 at the end.
        Raises OSError if the peer has left or sent an invalid request.
        """
        try:
            if self._answer is None:
                part = self.connection.recv(_PART)
                if not part:
                    raise OSError("the peer has closed the connection")
                self._received += part
                complete = _split(self._received)
                if complete is None:
                    return selectors.EVENT_READ
                self._answer = memoryview(_carry_out(reference(), *complete))
            self._answer = self._answer[self.connection.send(self._answer) :] if self._answer else self._answer
        except BlockingIOError:
            pass
        return selectors.EVENT_READ if self._answer is None else selectors.EVENT_WRITE if self._answer else 0


def _carry_out(agent: Exchanging | None, request: int, data: bytes) -> bytes:
    """Carries out a peer's request. Returns the answer; b"" if there is none."""
    if agent is None:
        return b""
    if request == Request.LOAD:
        agent.loadRemoteMD(data)
    elif request == Request.FETCH:
        metadata = agent.getLocalMD()
        return _HEAD.pack(_FORMAT, Request.LOAD, len(metadata)) + metadata
    elif request == Request.INVALIDATE:
        agent.forgetSender(data)
    return b""


class _Server:
    """Serves all peers in one thread without waiting for any of them, so a silent peer holds up nobody."""

    def __init__(self, listener: socket.socket, agent: weakref.ref[Exchanging]) -> None:
        self._listener, self._agent = listener, agent
        self._exchanges: list[_Exchange] = []  # ordered from the oldest
        self._selector = selectors.PollSelector()

    def run(self) -> None:
        """Serves peers until the listener is shut down."""
        self._listener.setblocking(False)
        with self._listener, self._selector:
            self._selector.register(self._listener, selectors.EVENT_READ)
            while self._serve():
                pass
            for exchange in self._exchanges:
                exchange.connection.close()

    def _serve(self) -> bool:
        """Polls the peers once, and serves those that are ready. Returns False if the agent is gone."""
        bound = max(0.0, self._exchanges[0].deadline - time.monotonic()) if self._exchanges else None
        ready = [key.data for key, _ in self._selector.select(bound)]
        if None in ready and not self._accept():
            return False
        now = time.monotonic()
        for exchange in [each for each in self._exchanges if each in ready or each.deadline <= now]:
            if exchange.deadline <= now:
                self._leave(exchange, f"the exchange took more than {_SECONDS:g} s")
            else:
                self._proceed(exchange)
        return True

    def _accept(self) -> bool:
        """Accepts a peer. Returns False if the agent is gone."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # the peer has already left
            return True
        except OSError:
            if self._agent() is None:
                return False
            time.sleep(_PAUSE_SECONDS)  # no descriptor is left; the peer waits
            return True
        if len(self._exchanges) >= _MOST_AT_ONCE:
            self._leave(self._exchanges[0], "too many peers have come after it")
        self._exchanges.append(_Exchange(connection))
        self._selector.register(connection, selectors.EVENT_READ, self._exchanges[-1])
        return True

    def _proceed(self, exchange: _Exchange) -> None:
        try:
            events = exchange.proceed(self._agent)
        except Exception as error:
            self._leave(exchange, str(error))
            return
        if events == 0:
            self._leave(exchange)
        else:
            self._selector.modify(exchange.connection, events, exchange)

    def _leave(self, exchange: _Exchange, reason: str = "") -> None:
        """Closes a peer's connection. Only this peer's request is lost."""
        if reason:
            _logger.warning("a peer's metadata request failed: %s", reason)
        self._exchanges.remove(exchange)
        self._selector.unregister(exchange.connection)
        exchange.connection.close()


class Sender:
    """Sends requests to listening peers, one after the other, in its own thread. This does not keep the agent alive."""

    def __init__(self, agent: Exchanging) -> None:
        self._agent = weakref.ref(agent)
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        forks.finalizer(agent, self._requests.put, None)
        Thread(self._run, "proxyccl-nixl-sender").start()

    def send(self, address: str, port: int, request: Request, data: bytes) -> None:
        self._requests.put(lambda: self._ask(address, port, request, data))

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            request()

    def _ask(self, address: str, port: int, request: Request, data: bytes) -> None:
        try:
            with _reach(address, port) as connection:
                deadline = time.monotonic() + _SECONDS
                _limit(connection, deadline)
                connection.sendall(_HEAD.pack(_FORMAT, request, len(data)) + data)
                if request == Request.FETCH:
                    _, metadata = _receive(connection, deadline)
                    agent = self._agent()
                    if agent is not None:
                        agent.loadRemoteMD(metadata)
                else:  # the peer closes it after this request, and could else serve the next one first
                    _limit(connection, deadline)
                    connection.recv(1)
        except Exception as error:
            text = "metadata can't be exchanged with %s port %s: %s"
            _logger.error(text, address, port, error)  # noqa: TRY400  a peer's failure, not this code's


def _reach(address: str, port: int) -> socket.socket:
    """Connects to a peer, which may not listen yet."""
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            return connect_to_any([(address, port)], deadline)
        except NoAddressError as error:
            refused = any(each.errno == errno.ECONNREFUSED for each in error.failures.values())
            if not refused or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


def _split(received: bytearray) -> tuple[int, bytes] | None:
    """A complete request and its data, or None if bytes are missing. Raises OSError if the bytes are invalid."""
    if len(received) < _HEAD.size:
        return None
    name, request, length = _HEAD.unpack_from(received)
    if name != _FORMAT or length > _LONGEST:
        raise OSError("the peer sent an invalid request")
    return (request, bytes(received[_HEAD.size :][:length])) if len(received) >= _HEAD.size + length else None


def _receive(connection: socket.socket, deadline: float) -> tuple[int, bytes]:
    received = bytearray()
    while (complete := _split(received)) is None:
        _limit(connection, deadline)
        part = connection.recv(_PART)
        if not part:
            raise OSError("the peer has closed the connection")
        received += part
    return complete


def _limit(connection: socket.socket, deadline: float) -> None:
    """Bounds the next call on a socket by a deadline of `time.monotonic`."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"the exchange took more than {_SECONDS:g} s")
    connection.settimeout(left)
