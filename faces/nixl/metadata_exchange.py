"""NIXL's exchange of metadata by sockets: an agent that listens takes, gives and forgets metadata.

It is neither encrypted nor authenticated, like NIXL's: who reaches the port gets this agent's metadata, and with it
its memory. Agents that exchange metadata by other means need no listener.
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
_SECONDS = 5.0  # for one exchange, and for a peer to start to listen
_MOST_AT_ONCE = 256  # exchanges of a listener; the oldest gives way to a further one
_PART = 1 << 20
_PAUSE_SECONDS = 0.05
_logger = get_logger(__name__.removeprefix("proxyccl.nixl."))


class Request(IntEnum):
    """A request to a peer. INVALIDATE has metadata of the sender, which tell it from a later agent of its name."""

    LOAD = 1
    FETCH = 2
    INVALIDATE = 3


class Exchanging(Protocol):
    """The calls of an agent that the exchange needs."""

    def loadRemoteMD(self, remote_metadata: bytes) -> bytes: ...
    def getLocalMD(self) -> bytes: ...
    def forgetSender(self, metadata: bytes) -> None: ...


def listen(agent: Exchanging, port: int) -> None:
    """Serves peers at a port, or at any free one if it is 0, until the agent is gone. The agent is not kept alive.

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
        listener.shutdown(socket.SHUT_RDWR)  # wakes its thread, which closes it


class _Exchange:
    """One peer's request, as far as it has come, and then the answer, as far as it is not sent. No call waits."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.deadline = time.monotonic() + _SECONDS
        self._received = bytearray()
        self._answer: memoryview | None = None

    def proceed(self, reference: weakref.ref[Exchanging]) -> int:
        """Proceeds. Returns the event to wait for, 0 at the end. Raises OSError if the peer has left, or sent nothing
        valid."""
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
    """Does what a peer asks for. Returns the answer, b"" for none."""
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
    """Serves all peers in one thread, each as far as its bytes have come: strangers that stay silent hold up nobody."""

    def __init__(self, listener: socket.socket, agent: weakref.ref[Exchanging]) -> None:
        self._listener, self._agent = listener, agent
        self._exchanges: list[_Exchange] = []  # the oldest first
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
        """Waits for peers once, and serves those that are ready. False: the agent has gone."""
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
        """Accepts a peer. False: the agent has gone."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:  # the peer has left meanwhile
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
        """Closes a peer's connection. A peer that leaves, or sends nothing valid, loses only its own request."""
        if reason:
            _logger.warning("a peer's metadata request failed: %s", reason)
        self._exchanges.remove(exchange)
        self._selector.unregister(exchange.connection)
        exchange.connection.close()


class Sender:
    """Sends requests to listening peers, one after the other, in a thread of its own. The agent is not kept alive."""

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
            return connect_to_any([(address, port)], deadline)
        except NoAddressError as error:
            refused = any(each.errno == errno.ECONNREFUSED for each in error.failures.values())
            if not refused or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


def _split(received: bytearray) -> tuple[int, bytes] | None:
    """A request and its data, or None: they have not come whole. Raises OSError if they are not valid."""
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
    """Bounds the next call by a deadline, of `time.monotonic`."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"the exchange took more than {_SECONDS:g} s")
    connection.settimeout(left)
