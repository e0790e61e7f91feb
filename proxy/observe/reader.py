"""A service's state at one moment: the observer's side of engine/observe.h and of the counters.

It opens the memory that a publication names and does not disturb the service: it does not write, and reads only a few
of a ring's slots to find how full it is.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from msgspec import Struct

from proxyccl.device.errors import ArgumentError
from proxyccl.proxy import _engine
from proxyccl.proxy.codec import Message
from proxyccl.proxy.observe.publications import Publication, find
from proxyccl.proxy.observe.segment import ObservedSegment, open_published, peer_of
from proxyccl.proxy.processes import cpu_time_of
from proxyccl.proxy.ring import RingContents, RingMemory, ring_bytes
from proxyccl.proxy.schedule import ScheduleWait
from proxyccl.proxy.thread import IdlePolicy
from proxyccl.proxy.trigger import MAX_CHANNELS

ffi, lib = _engine.ffi, _engine.lib


class WorkerView(Message, frozen=True):
    """A worker's activity since it began.

    Attributes:
        number: its number in its service.
        looks: polls of its rings and connections.
        age_ns: since it began; 0 when it has ended.
        idle_ns: of that time, when its thread had nothing to do, for any worker that shares it.
        sleeps: in that time.
        slept_ns: of that time.
        wakes: sleeps that a launch ended.
        cpu_ns: CPU time of its thread, for all workers that share it; None if the system does not tell.
        idle_times: the fields of that thread's `IdlePolicy`, in order.
    """

    number: int
    looks: int
    age_ns: int
    idle_ns: int
    sleeps: int
    slept_ns: int
    wakes: int
    cpu_ns: int | None
    idle_times: tuple[float, float, float]

    @property
    def idle(self) -> IdlePolicy:
        """The thread's policy."""
        return IdlePolicy(*self.idle_times)


class RingView(Struct, frozen=True):
    """A ring.

    Attributes:
        number: its number in its service.
        worker: the worker that drains it.
        size: slots.
        taken: triggers taken out of it since it was made.
        full: slots that hold a trigger now.
    """

    number: int
    worker: int
    size: int
    taken: int
    full: int


class ConnectionView(Message, frozen=True):
    """A connection to one peer.

    Attributes:
        worker: the worker that it belongs to.
        number: its number in that worker.
        peer: the rank that it leads to; None if that is not known.
        transport: the transport's name.
        completed: triggers, and sends of schedules, that were seen to be complete.
        outstanding: those that are not, as of the worker's last poll.
        errors: failures.
    """

    worker: int
    number: int
    peer: int | None
    transport: str
    completed: int
    outstanding: int
    errors: int


class ChannelView(Message, frozen=True):
    """A channel.

    Attributes:
        id: its id in its service.
        ring: number of the ring that its triggers come through.
        worker: the worker that serves them.
        connection: number, in that worker, of the connection that they go over; None for a Python handler.
        triggers: acted on, of all operations.
        puts: triggers that put data, and sends of schedules that did.
        bytes: bytes that the puts and gets moved.
        signals: triggers that signalled, and sends of schedules, all of which do.
        flushes: triggers that flushed.
        flush_ns: sum of the times of timed flushes, from issue to completion.
        timed_flushes: flushes that were timed: those that had to wait, one at a time on each connection.
        errors: triggers that failed.
        gets: triggers that got data.
    """

    id: int
    ring: int
    worker: int
    connection: int | None
    triggers: int
    puts: int
    bytes: int
    signals: int
    flushes: int
    flush_ns: int
    timed_flushes: int
    errors: int
    gets: int


class ServiceView(Struct, frozen=True):
    """A service at a moment.

    Attributes:
        publication: the service.
        time_ns: the moment, by CLOCK_MONOTONIC.
        workers: by number.
        rings: by number.
        connections: by worker and number.
        channels: those in use, by id.
        schedule_waits: of schedules that make no progress, as `ObservedSegment.schedule_waits` has them.
    """

    publication: Publication
    time_ns: int
    workers: tuple[WorkerView, ...]
    rings: tuple[RingView, ...]
    connections: tuple[ConnectionView, ...]
    channels: tuple[ChannelView, ...]
    schedule_waits: tuple[ScheduleWait, ...] = ()

    def connection_of(self, channel: ChannelView) -> ConnectionView | None:
        """The connection that a channel's triggers go over; None for a handler's channel."""
        return connection_of(channel, self.connections)


def connection_of(channel: ChannelView, connections: Iterable[ConnectionView]) -> ConnectionView | None:
    """The one of a service's connections that a channel's triggers go over; None for a handler's channel."""
    place = channel.worker, channel.connection
    return next((each for each in connections if (each.worker, each.number) == place), None)


class Observer:
    """Observes one service. Use it as a context manager, or call `close`.

    Args:
        publication: the service's.

    Raises:
        ArgumentError: the service is gone, or its publication is wrong.
    """

    def __init__(self, publication: Publication) -> None:
        self.publication = publication
        with contextlib.ExitStack() as opened:

            def mapped(handle: str, nbytes: int) -> int:
                memory = open_published(handle, nbytes)
                opened.callback(memory.close)
                return memory.ptr

            self._observed = ObservedSegment(publication.workers, publication.observed)
            opened.callback(self._observed.close)
            counters = mapped(publication.counters, MAX_CHANNELS * ffi.sizeof("ProxycclCounters"))
            self._counters = ffi.cast("ProxycclCounters *", counters)
            self._rings = []
            for place in publication.rings:
                size = 1 << place.size_log2
                self._rings.append(RingMemory(mapped(place.handle, ring_bytes(size)), size))
            self._opened = opened.pop_all()

    def __enter__(self) -> Observer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps the service's memory."""
        self._opened.close()

    def worker_stats(self, number: int) -> _engine.ProxycclWorkerStatsPointer:
        """The ProxycclWorkerStats of a worker."""
        return self._observed.worker(number)

    def snapshot(self) -> ServiceView:
        """The service now."""
        now = time.monotonic_ns()
        workers = []
        connections = []
        for number in range(self.publication.workers):
            stats = self.worker_stats(number)
            age = max(0, now - stats.started_ns) if stats.started_ns else 0  # it has ended
            idle = min(stats.idle_ns, age)  # counted in steps, the last of which may be newer than `now`
            slept = min(stats.slept_ns, idle)
            cpu = cpu_time_of(self.publication.pid, stats.thread)
            times = (stats.spin_ns / 1e3, stats.yield_ns / 1e3, stats.max_sleep_ns / 1e3)
            workers.append(WorkerView(number, stats.looks, age, idle, stats.sleeps, slept, stats.wakes, cpu, times))
            connections += self._connections_of(number)
        return ServiceView(
            self.publication,
            now,
            tuple(workers),
            tuple(self._ring_view(number) for number in range(len(self._rings))),
            tuple(connections),
            tuple(self._channels()),
            tuple(self._observed.schedule_waits()),
        )

    def _ring_view(self, number: int) -> RingView:
        ring = self._rings[number]
        taken, full = ring.count_full()
        return RingView(number, self.publication.rings[number].worker, ring.size, taken, full)

    def look_into_rings(self) -> list[RingContents]:
        """Its rings now, with the triggers in them."""
        return [ring.snapshot() for ring in self._rings]

    def _connections_of(self, worker: int) -> list[ConnectionView]:
        connections = []
        for number, stats in enumerate(self.worker_stats(worker).connections):
            if not stats.in_use:
                break
            completed = int(stats.completed)  # first: it follows the other
            transport = ffi.string(stats.transport).decode(errors="replace")
            outstanding = max(0, stats.issued - completed)
            connections.append(
                ConnectionView(worker, number, peer_of(stats), transport, completed, outstanding, int(stats.errors))
            )
        return connections

    def _channels(self) -> list[ChannelView]:
        channels = []
        for channel in range(MAX_CHANNELS):
            place = self._observed.pointer.channels[channel]
            if not place.connection or place.ring >= len(self._rings):  # it is newer than the publication
                continue
            of_handler = place.connection == lib.PROXYCCL_PLACE_HANDLER
            c = self._counters[channel]
            channels.append(
                ChannelView(
                    channel,
                    place.ring,
                    place.worker,
                    None if of_handler else place.connection - 1,
                    c.triggers,
                    c.puts,
                    c.bytes,
                    c.signals,
                    c.flushes,
                    c.flush_ns,
                    c.timed_flushes,
                    c.errors,
                    c.gets,
                )
            )
        return channels


def snapshots(job: str | None = None, process: int | None = None) -> dict[Path, ServiceView]:
    """This user's services on this machine now, by the files of their publications, ordered by job and rank.

    Args:
        job: of this job only; None for all.
        process: in this process only, a rank or a node daemon; None for all.

    Raises:
        ArgumentError: the directory of publications is not this user's own.
    """
    views = {}
    for path, publication in find(job, process=process):
        with contextlib.suppress(ArgumentError), Observer(publication) as observer:  # it was closed meanwhile
            views[path] = observer.snapshot()
    return views
