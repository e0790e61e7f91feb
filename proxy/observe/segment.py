"""The memory in which a service publishes its activity for observers (engine/observe.h): the service's side.

It is not pinned, because GPUs do not read it. So pages that no worker has touched take no memory, above all the trace's
records.
"""

from __future__ import annotations

import itertools
from typing import Any

from proxyccl.device._native import lib as native
from proxyccl.device.memory.shared_memory import SharedMemory
from proxyccl.proxy import _engine
from proxyccl.proxy.schedule import ScheduleWait

ffi, lib = _engine.ffi, _engine.lib


def observed_bytes(workers: int) -> int:
    """The size of a segment for this number of workers."""
    return int(ffi.sizeof("ProxycclObserved") + workers * ffi.sizeof("ProxycclWorkerStats"))


def peer_of(stats: _engine.ProxycclConnectionStats) -> int | None:
    """The rank that a connection leads to; None if that is not known."""
    return None if stats.peer == native.PROXYCCL_NO_PEER else int(stats.peer)


def outstanding_in(observed: _engine.ProxycclObservedPointer, channel: int) -> int | None:
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
    completed = stats.completed  # first: triggers issued meanwhile may be complete, but not the other way round
    return int(stats.issued - completed)


def schedule_waits_in(observed: _engine.ProxycclObservedPointer, workers: int) -> list[ScheduleWait]:
    """The waits of schedules that make no progress, or were stopped: at most one for each connection.

    Args:
        observed: a pointer to a ProxycclObserved.
        workers: number of its workers.
    """
    found = []
    for worker in range(workers):
        for stats in itertools.takewhile(lambda stats: stats.in_use, observed.workers[worker].connections):
            word = int(stats.schedule_wait)
            if word:
                kind, schedule = divmod(word, 1 << lib.PROXYCCL_SCHEDULE_WAIT_SHIFT)
                found.append(ScheduleWait(kind, peer_of(stats), schedule))
    return found


class ObservedSegment:
    """A service's segment.

    Args:
        workers: number of its workers.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
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
        """Records the destination of a channel's triggers. `connection` is None for a handler."""
        place = self._observed.channels[channel]
        place.worker, place.ring = worker, ring
        place.connection = lib.PROXYCCL_PLACE_HANDLER if connection is None else connection + 1

    def remove_channel(self, channel: int) -> None:
        """Records that a channel's id is not in use."""
        self._observed.channels[channel].connection = 0

    def outstanding(self, channel: int) -> int | None:
        """See `outstanding_in`."""
        return outstanding_in(self._observed, channel)

    def schedule_waits(self) -> list[ScheduleWait]:
        """See `schedule_waits_in`."""
        return schedule_waits_in(self._observed, self._workers)

    def close(self) -> None:
        """Frees the segment. The workers must have ended."""
        self.memory.close()
