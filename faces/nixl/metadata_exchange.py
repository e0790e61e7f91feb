"""NIXL's exchange of metadata by sockets. A peer asks a listening agent to add the peer's metadata, to send the agent's
metadata, or to remove the peer.

As in NIXL, the exchange is neither encrypted nor authenticated: anyone who reaches the port can fetch the agent's
metadata, which give access to the agent's memory. Agents whose programs exchange the metadata themselves need no
listener.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import queue
import socket
import struct
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from enum import IntEnum
from typing import Any, Protocol

from proxyccl.device.process import forks
from proxyccl.device.process.threads import Thread
from proxyccl.nixl.logging import get_logger
from proxyccl.proxy.connecting import NoAddressError, connect_to_any

_HEAD = struct.Struct("<4sBQ")
_FORMAT = b"PXM1"
_LONGEST = 64 << 20
_SECONDS = 5.0  # the time-out of one exchange, and of the wait until a peer listens
_MOST_AT_ONCE = 256  # exchanges in progress; another one cancels the oldest
_PART = 1 << 20
_PAUSE_SECONDS = 0.05
_logger = get_logger(__name__.removeprefix("proxyccl.nixl."))


class Request(IntEnum):
    """A request to a peer. LOAD asks the peer to add the request's metadata, FETCH asks the peer to send the peer's
    metadata, and INVALIDATE asks the peer to remove the sender. INVALIDATE contains the sender's metadata, because
    another agent may have taken the sender's name.
    """

    LOAD = 1
    FETCH = 2
    INVALIDATE = 3


class Exchanging(Protocol):
    """The methods of an agent that the exchange calls."""

    def loadRemoteMD(self, remote_metadata: bytes) -> bytes: ...
    def getLocalMD(self) -> bytes: ...
    def forgetSender(self, metadata: bytes) -> None: ...


def listen(agent: Exchanging, port: int) -> None:
    """Starts a thread that serves peers at a port (0 for any free port) until the agent is freed. The thread does not
    keep the agent alive.

    Raises:
        OSError: the port is taken.
    """
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    listener = socket.create_server(("", port), family=family, backlog=64, dualstack_ipv6=dual)
    forks.keep_from_children(listener)
    forks.finalizer(agent, _end, listener)
    reference = weakref.ref(agent)
    Thread(lambda: asyncio.run(_serve(listener, reference)), "proxyccl-nixl-listener").start()


def _end(listener: socket.socket) -> None:
    with contextlib.suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)  # wakes the listener's thread, which closes the socket


async def _serve(listener: socket.socket, reference: weakref.ref[Exchanging]) -> None:
    """Serves all peers with one event loop, so that a silent peer does not delay other peers. Returns when the listener
    is shut down.
    """
    exchanges: dict[asyncio.Task[None], None] = {}  # ordered from the oldest
    listener.setblocking(False)
    with listener:
        while True:
            try:
                connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError:
                if reference() is None:
                    return
                await asyncio.sleep(_PAUSE_SECONDS)  # no file descriptor is left, so the peer waits
                continue
            if len(exchanges) >= _MOST_AT_ONCE:
                _logger.warning("a peer's metadata request failed: too many peers have come after it")
                oldest = next(iter(exchanges))
                del exchanges[oldest]
                oldest.cancel()
            task = asyncio.create_task(_answer(connection, reference))
            exchanges[task] = None
            task.add_done_callback(lambda ended: exchanges.pop(ended, None))
            await asyncio.sleep(0)  # lets exchanges proceed even if more peers wait in accept


async def _answer(connection: socket.socket, reference: weakref.ref[Exchanging]) -> None:
    try:
        with connection:
            async with _bounded(connection):
                answer = _carry_out(reference(), *await _receive(connection))
                await asyncio.get_running_loop().sock_sendall(connection, answer)
    except Exception as error:
        _logger.warning("a peer's metadata request failed: %s", error)


def _carry_out(agent: Exchanging | None, request: int, data: bytes) -> bytes:
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


class Sender:
    """Sends requests to listening peers, one after the other, in a thread of its own. The thread does not keep the
    agent alive.
    """

    def __init__(self, agent: Exchanging) -> None:
        self._agent = weakref.ref(agent)
        self._requests: queue.SimpleQueue[Callable[[], Coroutine[Any, Any, None]] | None] = queue.SimpleQueue()
        forks.finalizer(agent, self._requests.put, None)
        Thread(self._run, "proxyccl-nixl-sender").start()

    def send(self, address: str, port: int, request: Request, data: bytes) -> None:
        self._requests.put(lambda: self._ask(address, port, request, data))

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            asyncio.run(request())

    async def _ask(self, address: str, port: int, request: Request, data: bytes) -> None:
        try:
            with _reach(address, port) as connection:
                async with _bounded(connection):
                    loop = asyncio.get_running_loop()
                    await loop.sock_sendall(connection, _HEAD.pack(_FORMAT, request, len(data)) + data)
                    if request == Request.FETCH:
                        _, metadata = await _receive(connection)
                        agent = self._agent()
                        if agent is not None:
                            agent.loadRemoteMD(metadata)
                    else:  # wait until the peer has carried out this request and closed the connection
                        await loop.sock_recv(connection, 1)
        except Exception as error:
            text = "metadata can't be exchanged with %s port %s: %s"
            _logger.error(text, address, port, error)  # noqa: TRY400  a peer's failure, not this code's


def _reach(address: str, port: int) -> socket.socket:
    deadline = time.monotonic() + _SECONDS
    while True:
        try:
            return connect_to_any([(address, port)], deadline)
        except NoAddressError as error:
            refused = any(each.errno == errno.ECONNREFUSED for each in error.failures.values())
            if not refused or time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


async def _receive(connection: socket.socket) -> tuple[int, bytes]:
    received = bytearray()
    length = 0
    while len(received) < _HEAD.size + length:
        part = await asyncio.get_running_loop().sock_recv(connection, _PART)
        if not part:
            raise OSError("the peer has closed the connection")
        received += part
        if len(received) >= _HEAD.size:
            name, request, length = _HEAD.unpack_from(received)
            if name != _FORMAT or length > _LONGEST:
                raise OSError("the peer sent an invalid request")
    return request, bytes(received[_HEAD.size :][:length])


@contextlib.asynccontextmanager
async def _bounded(connection: socket.socket) -> AsyncIterator[None]:
    connection.setblocking(False)
    try:
        async with asyncio.timeout(_SECONDS):
            yield
    except TimeoutError:
        raise TimeoutError(f"the exchange took more than {_SECONDS:g} s") from None
