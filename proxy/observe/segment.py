"""The memory in which a service publishes its activity (engine/observe.h). The service writes the memory, and observers
in other processes read the memory.

The memory is not pinned, because GPUs do not read it. So pages that no worker has touched, most of which are for trace
records, take no physical memory.
"""

from __future__ import annotations

import itertools

from proxyccl.device._native import lib as native
from proxyccl.device.errors import ArgumentError
from proxyccl.device.memory.shared_memory import SharedMemory
from proxyccl.proxy import _engine
from proxyccl.proxy.schedule import ScheduleWait

ffi, lib = _engine.ffi, _engine.lib


def peer_of(stats: _engine.ProxycclConnectionStats) -> int | None:
    """Returns the peer's rank of a connection; None if unknown."""
    return None if stats.peer == native.PROXYCCL_NO_PEER else int(stats.peer)


def open_published(handle: str, nbytes: int) -> SharedMemory:
    """Maps the memory of another process for an observer. `handle` is the memory's handle in hexadecimal. Raises
    ArgumentError if the memory can't be opened, or has fewer than `nbytes` bytes.
    """
    try:
        packed = bytes.fromhex(handle)
    except ValueError:
        raise ArgumentError("handle", f"{handle[:40]!r} is not a handle in hexadecimal") from None
    memory = SharedMemory.open(packed)
    if memory.nbytes < nbytes:
        memory.close()
        raise ArgumentError("handle", f"names memory of {memory.nbytes} bytes; expected at least {nbytes}")
    return memory


class ObservedSegment:
    """The segment in which a service publishes its activity. With a `handle` (in hexadecimal), this object maps the
    existing segment that the handle names; without a handle, it creates a new segment. Raises ArgumentError if the
    memory that `handle` names can't be opened, or is too short for this number of workers.
    """

    pointer: _engine.ProxycclObservedPointer  # the memory as a ProxycclObserved

    def __init__(self, workers: int, handle: str = "") -> None:
        self._workers = workers
        nbytes = int(ffi.sizeof("ProxycclObserved") + workers * ffi.sizeof("ProxycclWorkerStats"))
        self.memory = open_published(handle, nbytes) if handle else SharedMemory.allocate(nbytes)
        self.pointer = ffi.cast("ProxycclObserved *", self.memory.ptr)

    def worker(self, number: int) -> _engine.ProxycclWorkerStatsPointer:
        return self.pointer.workers + number

    def add_connection(self, worker: int, number: int, peer: int | None, transport: str) -> None:
        """Records a connection's peer and transport. Call this method before the connection is added to its worker."""
        stats = self.pointer.workers[worker].connections[number]
        stats.peer = native.PROXYCCL_NO_PEER if peer is None else peer
        stats.transport = transport.encode()
        stats.in_use = 1

    def place_channel(self, channel: int, worker: int, ring: int, connection: int | None) -> None:
        """Records the worker, ring and connection of a channel's triggers; `connection` is None for a handler."""
        place = self.pointer.channels[channel]
        place.worker, place.ring = worker, ring
        place.connection = lib.PROXYCCL_PLACE_HANDLER if connection is None else connection + 1

    def remove_channel(self, channel: int) -> None:
        self.pointer.channels[channel].connection = 0

    def outstanding(self, channel: int) -> int | None:
        """See `ProxyService.outstanding`. Also returns None for an unused id."""
        place = self.pointer.channels[channel]
        if place.connection in (0, lib.PROXYCCL_PLACE_HANDLER):
            return None
        stats = self.worker(place.worker).connections[place.connection - 1]
        completed = stats.completed  # read before `issued`, so that `issued` - `completed` is not negative
        return int(stats.issued - completed)

    def schedule_waits(self) -> list[ScheduleWait]:
        """Returns the waits of schedules without progress or stopped by a failure, at most one per connection."""
        found = []
        for worker in range(self._workers):
            for stats in itertools.takewhile(lambda stats: stats.in_use, self.worker(worker).connections):
                word = int(stats.schedule_wait)
                if word:
                    kind, schedule = divmod(word, 1 << lib.PROXYCCL_SCHEDULE_WAIT_SHIFT)
                    found.append(ScheduleWait(kind, peer_of(stats), schedule))
        return found

    def close(self) -> None:
        """Unmaps the segment, and frees it if this object created it; then the service's workers must have ended."""
        vars(self).pop("pointer", None)  # a later use of `pointer` raises AttributeError
        self.memory.close()
