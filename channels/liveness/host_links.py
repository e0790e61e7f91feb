"""Sockets between ranks of different hosts, over which ranks report that they abort or close the communicator, and by
which they notice when a peer's process ends. Ranks of the same host report aborts in shared memory (control.py).
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import socket
import struct
import time
from hmac import compare_digest
from typing import Annotated

from msgspec import Meta, Struct

from proxyccl.channels.segment.control import Presence
from proxyccl.channels.segment.error_record import ErrorRecord
from proxyccl.device.errors import PeerLostError
from proxyccl.device.memory.descriptors import EXHAUSTED, naming_exhaustion, require_descriptors
from proxyccl.device.process import forks
from proxyccl.proxy.codec import Codec, Message, ProtocolError
from proxyccl.proxy.hosts import host_addresses

_TOKEN_BYTES = 16
_HELLO = struct.Struct(f"<I{_TOKEN_BYTES}s")  # longer than a valid answer, so that an echo is invalid
_INTERVAL_SECONDS = 0.1
_WHILE_JOINING = 4
"""The number of descriptors needed in addition to those of the links: for the listener, for calls, and for querying
this host's addresses.
"""
_CALLED_AGAIN = (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, *EXHAUSTED)
"""The errors after which a call is repeated, because networks recover and other calls release descriptors."""
_KEEP_ALIVE = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 5,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 5,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 3,
}

GREETING_SECONDS = 2.0
"""Seconds that a connection may take to send its hello. Ranks send their hello immediately."""
MOST_GREETED = 256
"""The most connections whose hello is awaited at the same time; a further connection replaces the one that has been
silent for longest.
"""
_MOST_ACCEPTED = 64  # the number of connections to accept before deadlines are checked again
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_GONE = (errno.ECONNABORTED, errno.EPROTO)


class _Stranger(Struct):
    connection: socket.socket
    deadline: float
    received: bytes = b""


class Greetings:
    """Accepts connections, and reads from each a first message of fixed size, the hello. All connections are read
    concurrently, so a silent or slow client does not delay other clients.

    Args:
        listener: the listening socket, which this object makes non-blocking, and the caller closes.
        nbytes: the size of a hello in bytes.
    """

    def __init__(self, listener: socket.socket, nbytes: int) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._nbytes = nbytes
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._strangers: dict[socket.socket, _Stranger] = {}  # connections in the order of arrival

    def wait(self, seconds: float) -> list[tuple[socket.socket, bytes]]:
        """Returns the connections that have sent a complete hello since the last call, each with the hello's bytes. The
        connections are non-blocking, and the caller closes them.

        Args:
            seconds: the longest wait for a new connection or data.

        Raises:
            OSError: no descriptor is left to accept a connection, and no connection without a hello can be closed to
                free one.
        """
        greeted = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif (stranger := self._strangers.get(key.data)) is not None and self._hear(stranger):
                greeted.append((stranger.connection, stranger.received))
        now = time.monotonic()
        for late in [each for each in self._strangers.values() if each.deadline < now]:
            self._drop(late)
        return greeted

    def close(self) -> None:
        """Closes the connections that have not sent their hello."""
        for stranger in list(self._strangers.values()):
            self._drop(stranger)
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(_MOST_ACCEPTED):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _GONE:
                    continue
                if error.errno not in _NO_ROOM or not self._strangers:
                    raise
                self._drop_oldest()
                continue
            if len(self._strangers) == MOST_GREETED:
                self._drop_oldest()
            connection.setblocking(False)
            self._strangers[connection] = _Stranger(connection, time.monotonic() + GREETING_SECONDS)
            self._selector.register(connection, selectors.EVENT_READ, connection)

    def _hear(self, stranger: _Stranger) -> bool:
        """Reads bytes from a connection, and returns whether its hello is complete. If the hello is complete, the
        caller owns the connection."""
        try:
            data = stranger.connection.recv(self._nbytes - len(stranger.received))
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        stranger.received += data
        if not data:
            self._drop(stranger)
        elif len(stranger.received) == self._nbytes:
            self._forget(stranger)
            return True
        return False

    def _drop_oldest(self) -> None:
        self._drop(next(iter(self._strangers.values())))

    def _drop(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        with contextlib.suppress(OSError):
            stranger.connection.close()

    def _forget(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.connection)
        del self._strangers[stranger.connection]


class Offer(Message, frozen=True):
    """A rank's message with the addresses at which it listens, and the secret that a connecting rank must send."""

    addresses: Annotated[list[str], Meta(max_length=256)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    token: Annotated[bytes, Meta(min_length=_TOKEN_BYTES, max_length=_TOKEN_BYTES)]


OFFER = Codec(Offer, 64 << 10)
_MESSAGE = Codec[ErrorRecord | Presence](ErrorRecord | Presence, 16 << 10, name="message")


class HostLink:
    """A connection to one rank of another host. Over this connection, each rank reports when it closes or aborts the
    communicator."""

    def __init__(self, peer: int, connection: socket.socket) -> None:
        self.peer = peer
        self._socket = connection
        self._socket.setblocking(False)
        forks.keep_from_children(connection)
        for option, value in _KEEP_ALIVE.items():  # makes the system notice the loss of the peer's host or network
            self._socket.setsockopt(*option, value)
        self._received = b""

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: ErrorRecord | Presence) -> None:
        """Sends the error record of an abort, or this rank's new `Presence`. Never blocks.

        Ignores errors, because an unreachable peer has ended or notices the failure by its own time-out.
        """
        with contextlib.suppress(OSError):
            self._socket.send(_MESSAGE.encode(message) + b"\n")

    def receive(self) -> ErrorRecord | Presence | str | None:
        """Returns the peer's next message, None if no message has arrived yet, or "lost" if the connection has ended.

        After an invalid message, the result is also "lost".
        """
        if b"\n" not in self._received:
            try:
                data = self._socket.recv(4096)
            except BlockingIOError:
                return None
            except OSError:
                return "lost"
            self._received += data
            if b"\n" not in self._received:
                return None if data and len(self._received) <= _MESSAGE.limit else "lost"
        line, _, self._received = self._received.partition(b"\n")
        try:
            return _MESSAGE.decode(line, f"rank {self.peer}")
        except ProtocolError:
            return "lost"

    def close(self) -> None:
        """Sends `Presence.LEFT` to the peer, and closes the connection."""
        self.send(Presence.LEFT)
        self._socket.close()


class Listener:
    """Connects a rank to the ranks of other hosts. Before a rank calls `join`, all ranks must have exchanged the
    results of `offer`."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._token = os.urandom(_TOKEN_BYTES)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        with naming_exhaustion("links to ranks of other hosts"):
            self._socket = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=dual)

    def offer(self, peers: int) -> Offer:
        """Returns the message with this rank's addresses and secret, which the other ranks need for `join`.

        Args:
            peers: the number of ranks of other hosts.

        Raises:
            ResourceError: there are too few descriptors for the connections. `offer` checks their number, because
                during `join` this rank could not report the error to its peers.
        """
        with naming_exhaustion(f"links to {peers} ranks of other hosts"):
            require_descriptors(peers + _WHILE_JOINING)
        return Offer(host_addresses(), self._socket.getsockname()[1], self._token)

    def join(self, peers: list[int], offers: list[Offer], timeout: float) -> dict[int, HostLink]:
        """Connects to ranks of other hosts. This rank connects to lower ranks, and accepts connections of higher ranks.

        Raises:
            PeerLostError: this rank could not connect to a peer, or a peer did not connect within `timeout`.
        """
        deadline = time.monotonic() + timeout
        links: dict[int, HostLink] = {}
        for peer in peers:
            if peer < self._rank:
                links[peer] = self._call(peer, offers[peer], deadline)
        awaited = {peer for peer in peers if peer > self._rank}
        with contextlib.closing(Greetings(self._socket, _HELLO.size)) as greetings:
            while awaited:
                if time.monotonic() > deadline:
                    raise PeerLostError(
                        f"rank {min(awaited)} of another host did not connect in time; is a firewall between them?",
                        rank=self._rank,
                        peer=min(awaited),
                        operation="bootstrap",
                    )
                for connection, hello in greetings.wait(_INTERVAL_SECONDS):
                    caller = self._answered(connection, hello, awaited)
                    if caller is None:
                        connection.close()
                    else:
                        awaited.remove(caller)
                        links[caller] = HostLink(caller, connection)
        return links

    def _call(self, peer: int, offer: Offer, deadline: float) -> HostLink:
        # Connects to all addresses concurrently, because some may be unreachable, or belong to another host.
        failures = dict.fromkeys(offer.addresses, "no answer")
        to_call, next_calls = list(offer.addresses), 0.0
        with selectors.DefaultSelector() as calls, contextlib.ExitStack() as undo:
            undo.callback(_close_all, calls)
            while (to_call or calls.get_map()) and time.monotonic() < deadline:
                if time.monotonic() > next_calls:
                    next_calls = time.monotonic() + _INTERVAL_SECONDS
                    refused = {address: _begin_call(calls, address, offer.port) for address in to_call}
                    failures |= {address: os.strerror(status) for address, status in refused.items() if status}
                    to_call = [address for address, status in refused.items() if status in _CALLED_AGAIN]
                for key, _ in calls.select(_INTERVAL_SECONDS):
                    connection, address = key.data
                    try:
                        if key.events == selectors.EVENT_WRITE:  # if connecting failed, `send` raises an error
                            connection.send(_HELLO.pack(self._rank, offer.token))
                            calls.modify(connection, selectors.EVENT_READ, key.data)
                            continue
                        if connection.recv(_TOKEN_BYTES) == offer.token:
                            calls.unregister(connection)
                            return HostLink(peer, connection)
                        failures[address] = "another process listens there"
                    except OSError as error:
                        failures[address] = str(error)
                        if error.errno in _CALLED_AGAIN:
                            to_call.append(address)
                    calls.unregister(connection)
                    connection.close()
        tried = "; ".join(f"{address}: {failure}" for address, failure in failures.items())
        raise PeerLostError(
            f"no connection to rank {peer} on another host, port {offer.port}: {tried or 'it has no address'}",
            rank=self._rank,
            peer=peer,
            operation="bootstrap",
        )

    def _answered(self, connection: socket.socket, hello: bytes, awaited: set[int]) -> int | None:
        caller, token = _HELLO.unpack(hello)
        if caller not in awaited or not compare_digest(token, self._token):
            return None
        try:
            connection.sendall(self._token)  # can't block, because the send buffer is empty
        except OSError:
            return None
        return int(caller)

    def close(self) -> None:
        self._socket.close()


def _begin_call(calls: selectors.BaseSelector, address: str, port: int) -> int:
    """Starts a non-blocking connect. Returns 0, or the errno of an immediate failure."""
    try:
        connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        return error.errno or errno.EIO
    connection.setblocking(False)
    status = connection.connect_ex((address, port))
    if status not in (0, errno.EINPROGRESS):
        connection.close()
        return status
    calls.register(connection, selectors.EVENT_WRITE, (connection, address))
    return 0


def _close_all(calls: selectors.BaseSelector) -> None:
    for key in list(calls.get_map().values()):
        key.data[0].close()
