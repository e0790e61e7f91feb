"""The connections and channels of one client of the daemon."""

from __future__ import annotations

import contextlib

from proxyccl.device.errors import ArgumentError, ProtocolError, ProxyCCLError
from proxyccl.device.runtime import PinnedMemory, Runtime
from proxyccl.proxy.daemon.protocol import (
    ChannelReserved,
    ConnectCopy,
    Connected,
    Done,
    FreeChannels,
    ReserveChannel,
    ReserveElsewhere,
    SetChannel,
)
from proxyccl.proxy.daemon.session_memories import REST_SECONDS, SessionMemories
from proxyccl.proxy.interface import Connection
from proxyccl.proxy.service import ProxyService
from proxyccl.proxy.transports.table import find_transport

_SEMAPHORE_BYTES = 8


class SessionChannels:
    """Connections by number, and channels by id.

    Args:
        proxy: the client's service.
        runtime: opens the semaphores that signals are copied to.
        memories: closes them when no signal to them is in flight.
    """

    def __init__(self, proxy: ProxyService, runtime: Runtime, memories: SessionMemories) -> None:
        self._proxy = proxy
        self._runtime = runtime
        self._memories = memories
        self._connections: list[Connection] = []
        self._channels: dict[int, Connection | None] = {}  # None: served by the client's process
        self._words: dict[int, PinnedMemory] = {}  # the semaphore that a channel signals, where it is copied to

    def handle(
        self, request: ConnectCopy | ReserveChannel | ReserveElsewhere | SetChannel | FreeChannels
    ) -> Connected | ChannelReserved | Done:
        """Carries out a request."""
        match request:
            case ConnectCopy(peer=peer, transport=transport):
                return self.add(self._proxy.connect_copy(peer=peer, transport=transport))
            case ReserveChannel(connection=number):
                return self._reserve(self._find(number))
            case ReserveElsewhere():
                channel = self._proxy.reserve_elsewhere()
                self._channels[channel] = None
                return ChannelReserved(channel)
            case SetChannel():
                return self._set(request, self._find(request.connection))
            case FreeChannels(channels=channels, connection=number):
                return self._free(channels, self._find(number))

    def add(self, connection: Connection) -> Connected:
        """Lets the client use a connection."""
        self._connections.append(connection)
        return Connected.of(connection)

    def _find(self, number: int) -> Connection:
        if number >= len(self._connections):
            raise ProtocolError(f"connection: this client has no connection {number}")
        return self._connections[number]

    def _reserve(self, connection: Connection) -> ChannelReserved:
        channel = self._proxy.reserve_channel(connection)
        self._channels[channel] = connection
        return ChannelReserved(channel, self._proxy.ring_of(channel))

    def _require(self, channel: int, connection: Connection) -> None:
        if self._channels.get(channel) is not connection:
            raise ProtocolError(f"channel: connection {connection.number} has no channel {channel}")

    def _set(self, request: SetChannel, connection: Connection) -> Done:
        self._require(request.channel, connection)
        if not find_transport(connection.transport).is_remote:
            self._set_copied(request, connection)
            return Done()
        if request.address == 0 or request.address % _SEMAPHORE_BYTES:
            raise ArgumentError("address", "a semaphore is a word of 8 bytes, aligned to 8")
        with self._proxy.paused(REST_SECONDS):
            self._proxy.set_channel(request.channel, connection, request.address)
        return Done()

    def _set_copied(self, request: SetChannel, connection: Connection) -> None:
        word = self._runtime.open_pinned(request.word)
        try:
            if word.nbytes != _SEMAPHORE_BYTES or word.host_ptr % _SEMAPHORE_BYTES:
                raise ArgumentError("word", "a semaphore is a word of 8 bytes, aligned to 8")
            with self._proxy.paused(REST_SECONDS):
                self._proxy.set_channel(request.channel, connection, word.host_ptr)
        except ProxyCCLError:
            word.close()
            raise
        self._retire_word(request.channel)
        self._words[request.channel] = word

    def _retire_word(self, channel: int) -> None:
        if channel in self._words:
            self._memories.retire(self._words.pop(channel).close)

    def _free(self, channels: list[int], connection: Connection) -> Done:
        for channel in channels:
            self._require(channel, connection)
            with self._proxy.paused(REST_SECONDS):
                self._proxy.free_channels([channel], connection)
            del self._channels[channel]
            self._retire_word(channel)
        return Done()

    def close(self) -> None:
        """Closes the semaphores. The service must have ended."""
        with contextlib.ExitStack() as each:
            for word in self._words.values():
                each.callback(word.close)
            self._words.clear()
