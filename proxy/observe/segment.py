"""The memory that a service shows itself in (engine/observe.h): the service's side.

What no worker has touched takes no memory, the trace's records above all. It is not pinned: no GPU reads it.
"""

from __future__ import annotations

from typing import Any

from proxyccl.device._native import lib as native
from proxyccl.device.shared_memory import SharedMemory
from proxyccl.proxy import _engine

ffi, lib = _engine.ffi, _engine.lib


def observed_bytes(workers: int) -> int:
    """The size of a segment for so many workers."""
    return int(ffi.sizeof("ProxycclObserved") + workers * ffi.sizeof("ProxycclWorkerStats"))


def outstanding_in(observed: Any, channel: int) -> int | None:
    """Triggers of a channel's connection that are issued and not known to be complete; None for a handler's channel,
    and for an id that is not in use.

    Args:
        observed: a pointer to a ProxycclObserved.
        channel: channel id.
    """
    place = observed.channels[channel]
    if place.connection in (0, lib.PROXYCCL_PLACE_HANDLER):
        return None
    stats = observed.workers[place.worker].connections[place.connection - 1]
    completed = stats.completed  # first: what is issued meanwhile may be complete, but not the other way round
    return int(stats.issued - completed)


class ObservedSegment:
    """A service's segment.

    Args:
        workers: number of its workers.
    """

    def __init__(self, workers: int) -> None:
        self.memory = SharedMemory.allocate(observed_bytes(workers))
        self._observed = ffi.cast("ProxycclObserved *", self.memory.ptr)

    def worker(self, number: int) -> Any:
        """The ProxycclWorkerStats of a worker."""
        return self._observed.workers + number

    def add_connection(self, worker: int, number: int, peer: int | None, transport: str) -> None:
        """Describes a worker's connection, before the worker has it."""
        stats = self._observed.workers[worker].connections[number]
        stats.peer = native.PROXYCCL_NO_PEER if peer is None else peer
        stats.transport = transport.encode()
        stats.in_use = 1

    def place_channel(self, channel: int, worker: int, ring: int, connection: int | None) -> None:
        """Says where a channel's triggers go; None for a handler."""
        place = self._observed.channels[channel]
        place.worker, place.ring = worker, ring
        place.connection = lib.PROXYCCL_PLACE_HANDLER if connection is None else connection + 1

    def remove_channel(self, channel: int) -> None:
        """Says that a channel's id is not in use."""
        self._observed.channels[channel].connection = 0

    def outstanding(self, channel: int) -> int | None:
        """See `outstanding_in`."""
        return outstanding_in(self._observed, channel)

    def close(self) -> None:
        """Frees it. The workers have ended."""
        self.memory.close()
