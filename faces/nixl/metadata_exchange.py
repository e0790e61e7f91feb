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
    loop, freed = asyncio.new_event_loop(), asyncio.Event()
    forks.finalizer(agent, loop.call_soon_threadsafe, freed.set)
    reference = weakref.ref(agent)

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(_serve(listener, reference, freed))

    Thread(run, "proxyccl-nixl-listener").start()


async def _serve(listener: socket.socket, reference: weakref.ref[Exchanging], freed: asyncio.Event) -> None:
    """Serves all peers with one event loop, so that a silent peer does not delay other peers."""
    exchanges: dict[object, Any] = {}  # the task of each connection, from the oldest

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(exchanges) >= _MOST_AT_ONCE:
            _logger.warning("a peer's metadata request failed: too many peers have come after it")
            exchanges.pop(next(iter(exchanges))).cancel()
        exchanges[writer] = asyncio.current_task()
        try:
            async with _bounded(writer):
                writer.write(_carry_out(reference(), *await _receive(reader)))
        except Exception as error:
            _logger.warning("a peer's metadata request failed: %s", error)
        finally:
            exchanges.pop(writer, None)

    async with await asyncio.start_server(answer, sock=listener):
        await freed.wait()


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
            reader, writer = await asyncio.open_connection(sock=_reach(address, port))
            async with _bounded(writer):
                writer.write(_HEAD.pack(_FORMAT, request, len(data)) + data)
                if request == Request.FETCH:
                    _, metadata = await _receive(reader)
                    agent = self._agent()
                    if agent is not None:
                        agent.loadRemoteMD(metadata)
                else:  # wait until the peer has carried out this request and closed the connection
                    await reader.read(1)
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


async def _receive(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    try:
        name, request, length = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        if name != _FORMAT or length > _LONGEST:
            raise OSError("the peer sent an invalid request")
        return request, await reader.readexactly(length)
    except asyncio.IncompleteReadError:
        raise OSError("the peer has closed the connection") from None


@contextlib.asynccontextmanager
async def _bounded(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    """Runs a block of at most _SECONDS, which includes the time to send what the block has written to a connection.
    Closes the connection at the end.
    """
    try:
        async with asyncio.timeout(_SECONDS):
            yield
            writer.close()
            await writer.wait_closed()
    except TimeoutError:
        raise TimeoutError(f"the exchange took more than {_SECONDS:g} s") from None
    finally:
        writer.transport.abort()
