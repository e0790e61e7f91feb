"""The channel ids of a service: which are in use, and the ring, worker and connection or handler of each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from proxyccl.device.errors import ResourceError
from proxyccl.proxy import _engine
from proxyccl.proxy.interface import Connection
from proxyccl.proxy.observe.segment import ObservedSegment
from proxyccl.proxy.shared_words import SharedWords
from proxyccl.proxy.trigger import MAX_CHANNELS

ffi, lib = _engine.ffi, _engine.lib


class ChannelTable:
    """Assigns each channel to one worker and one ring of that worker. The caller serialises all calls.

    Args:
        service: a ProxycclService.
        shared: the memory of the channels' counters and flush words.
        observed: the segment where observers read each channel's place.
        rings: number of rings, assigned to workers in turn.
        workers: number of workers.
        ring_per_connection: whether connections are assigned rings in turn, and a connection's channels share its ring;
            otherwise channels are assigned rings in turn.
    """

    def __init__(
        self,
        service: Any,
        shared: SharedWords,
        observed: ObservedSegment,
        *,
        rings: int,
        workers: int,
        ring_per_connection: bool = False,
    ) -> None:
        self._service = service
        self._shared = shared
        self._observed = observed
        self._rings_of = [range(worker, rings, workers) for worker in range(workers)]
        self._ring_per_connection = ring_per_connection
        self._ring_of: dict[int, int] = {}  # by channel
        self._free = list(reversed(range(MAX_CHANNELS)))
        self._handlers = 0
        self._given = 0  # ids that other services reserved

    def __len__(self) -> int:
        return len(self._ring_of)

    def ring_of(self, channel: int) -> int:
        """The number of the ring that a channel's triggers go through."""
        return self._ring_of[channel]

    def reserve(self, worker: int, channel: int | None = None, *, connection: int | None = None) -> int:
        """Reserves a channel id for a worker. The engine refuses triggers on that id until the id is set.

        Args:
            worker: number of the worker.
            channel: an id that another service reserved; None to reserve one here.
            connection: number of the channel's connection; None for a handler or another service.

        Raises:
            ResourceError: all ids are in use.
        """
        if channel is not None:
            turn = self._given
            self._given += 1
        elif self._free:
            channel = self._free.pop()
            turn = channel // len(self._rings_of)
        else:
            raise ResourceError(f"all {MAX_CHANNELS} channel ids are in use")
        if self._ring_per_connection and connection is not None:
            turn = connection // len(self._rings_of)
        rings = self._rings_of[worker]
        self._ring_of[channel] = rings[turn % len(rings)]
        return channel

    def set_connection(
        self, channel: int, connection: Connection, pointer: _engine.ProxycclConnectionPointer, remote_semaphore: int
    ) -> None:
        """Directs a channel's triggers to a connection, and its signals to a word of the peer."""
        lib.proxyccl_service_set_channel(
            self._service,
            channel,
            pointer,
            ffi.cast("uint64_t *", remote_semaphore),
            self._shared.flushed_host(channel),
            self._shared.completed_host(channel),
        )
        number = connection.number // len(self._rings_of)
        self._observed.place_channel(channel, connection.worker, self._ring_of[channel], number)

    def reserve_for_handler(self, channel: int | None) -> tuple[int, int]:
        """Reserves an id for a Python handler. Returns the id and its worker; workers are assigned in turn.

        Args:
            channel: an id that another service reserved; None to reserve one here.

        Raises:
            ResourceError: all ids are in use.
        """
        worker = self._handlers % len(self._rings_of)
        self._handlers += 1
        return self.reserve(worker, channel), worker

    def set_handler(self, channel: int, worker: int) -> None:
        """Directs a channel's triggers to its handler, which must be added first."""
        lib.proxyccl_service_set_handler(
            self._service, channel, self._shared.flushed_host(channel), self._shared.completed_host(channel)
        )
        self._observed.place_channel(channel, worker, self._ring_of[channel], None)

    def free(self, channels: Iterable[int]) -> None:
        """Frees channel ids. All their triggers must be drained, and peers must no longer signal."""
        for channel in channels:
            lib.proxyccl_service_set_channel(self._service, channel, ffi.NULL, ffi.NULL, ffi.NULL, ffi.NULL)
            self._observed.remove_channel(channel)
            self._shared.clear(channel)
            self._free.append(channel)
