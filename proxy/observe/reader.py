"""Reads a service's current state, from the memory that engine/observe.h declares and from the channels' counters.

An observer opens the memory that a publication names. The observer does not write to the memory, and reads only a few
slots of each ring, so the service is not disturbed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from proxyccl.device.errors import ArgumentError
from proxyccl.device.memory.shared_memory import SharedMemory
from proxyccl.proxy import _engine
from proxyccl.proxy.codec import Message
from proxyccl.proxy.interface import ChannelCounters
from proxyccl.proxy.observe.publications import Publication, find
from proxyccl.proxy.observe.segment import ObservedSegment, open_published, peer_of
from proxyccl.proxy.processes import cpu_time_of
from proxyccl.proxy.ring import Ring, RingContents, ring_bytes
from proxyccl.proxy.schedule import ScheduleWait
from proxyccl.proxy.trigger import MAX_CHANNELS

ffi, lib = _engine.ffi, _engine.lib


class WorkerView(Message, frozen=True):
    """A worker's activity since its start."""

    number: int  # the worker's number in its service
    looks: int  # number of polls of the worker's rings and connections
    age_ns: int  # time since the worker's start; 0 once the worker has ended
    idle_ns: int  # the part of `age_ns` in which the worker's thread had nothing to do for any of its workers
    sleeps: int  # number of the thread's sleeps
    slept_ns: int  # time that the thread slept
    wakes: int  # how often a launch woke the thread
    # The thread's CPU time, for all its workers together; None if the system does not report the CPU time.
    cpu_ns: int | None
    idle_times: tuple[float, float, float]  # the fields of the thread's `IdlePolicy`, in order


class RingView(Struct, frozen=True):
    """A ring's state at one moment."""

    number: int  # the ring's number in its service
    worker: int  # number of the worker that drains the ring
    size: int  # number of slots
    taken: int  # number of triggers that the proxy has taken since the ring was created
    full: int  # number of slots that hold a trigger at this moment


class ConnectionView(Message, frozen=True):
    """A connection's state at one moment."""

    worker: int  # number of the worker that serves the connection
    number: int  # the connection's number in that worker
    peer: int | None  # the rank at the other end; None if unknown
    transport: str  # the transport's name
    completed: int  # number of triggers and of schedules' sends that are known to be complete
    # Number of triggers and of schedules' sends that were not known to be complete at the worker's last poll.
    outstanding: int
    errors: int  # number of failures
    rails: int = 0  # number of rails; 0 for a connection without rails
    rails_up: int = 0  # number of rails in use
    rail_failures: int = 0  # number of failures of a rail


class ChannelView(ChannelCounters, frozen=True, kw_only=True):
    """A channel's ring, worker, connection and counters at one moment."""

    id: int  # the channel's id in its service
    ring: int  # number of the ring that the channel's triggers come through
    worker: int  # number of the worker that serves the channel
    connection: int | None  # number, in that worker, of the channel's connection; None for a Python handler
    flush_ns: int = 0  # sum of the times of timed flushes, from issue to completion
    # Number of timed flushes. A flush is timed unless it completes immediately or its connection is timing another
    # flush.
    timed_flushes: int = 0
    errors: int = 0  # number of triggers that have failed


class ServiceView(Struct, frozen=True):
    """The state of a service at one moment."""

    publication: Publication  # the service's publication
    time_ns: int  # the moment, by CLOCK_MONOTONIC
    workers: tuple[WorkerView, ...]  # the service's workers, by number
    rings: tuple[RingView, ...]  # the service's rings, by number
    connections: tuple[ConnectionView, ...]  # the service's connections, by worker and number
    channels: tuple[ChannelView, ...]  # the channels in use, by id
    # The waits of schedules that make no progress, from `ObservedSegment.schedule_waits`.
    schedule_waits: tuple[ScheduleWait, ...] = ()

    def connection_of(self, channel: ChannelView) -> ConnectionView | None:
        """Returns the connection that carries a channel's triggers; None for a handler's channel."""
        return connection_of(channel, self.connections)


def connection_of(channel: ChannelView, connections: Iterable[ConnectionView]) -> ConnectionView | None:
    """Returns the connection, from `connections`, that carries the channel's triggers; None for a handler's channel."""
    place = channel.worker, channel.connection
    return next((each for each in connections if (each.worker, each.number) == place), None)


class Observer(contextlib.AbstractContextManager["Observer"]):
    """Reads the state of one service. Use an observer as a context manager, or call `close`. Raises ArgumentError if
    the service has ended, or if its publication is invalid.
    """

    def __init__(self, publication: Publication) -> None:
        self.publication = publication
        with contextlib.ExitStack() as opened:

            def mapped(handle: str, nbytes: int) -> SharedMemory:
                memory = open_published(handle, nbytes)
                opened.callback(memory.close)
                return memory

            self._observed = ObservedSegment(publication.workers, publication.observed)
            opened.callback(self._observed.close)
            counters = mapped(publication.counters, MAX_CHANNELS * ffi.sizeof("ProxycclCounters"))
            self._counters = ffi.cast("ProxycclCounters *", counters.ptr)
            self._rings = []
            for place in publication.rings:
                size = 1 << place.size_log2
                self._rings.append(Ring(mapped(place.handle, ring_bytes(size)), size))
            self._opened = opened.pop_all()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._opened.close()

    def worker_stats(self, number: int) -> _engine.ProxycclWorkerStatsPointer:
        return self._observed.worker(number)

    def snapshot(self) -> ServiceView:
        """Returns the service's state at this moment."""
        now = time.monotonic_ns()
        workers = []
        connections = []
        for number in range(self.publication.workers):
            stats = self.worker_stats(number)
            age = max(0, now - stats.started_ns) if stats.started_ns else 0
            idle = min(stats.idle_ns, age)  # the worker may have increased idle_ns after `now` was read
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
        """Returns the service's rings at this moment, with the triggers in them."""
        return [ring.snapshot() for ring in self._rings]

    def _connections_of(self, worker: int) -> list[ConnectionView]:
        connections = []
        for number, stats in enumerate(self.worker_stats(worker).connections):
            if not stats.in_use:
                break
            completed = int(stats.completed)  # read before `issued`, so that `outstanding` is not negative
            transport = ffi.string(stats.transport).decode(errors="replace")
            outstanding = max(0, stats.issued - completed)
            counts = (completed, outstanding, int(stats.errors))
            rails = (int(stats.rails), int(stats.rails_up), int(stats.rail_failures))
            connections.append(ConnectionView(worker, number, peer_of(stats), transport, *counts, *rails))
        return connections

    def _channels(self) -> list[ChannelView]:
        channels = []
        for channel in range(MAX_CHANNELS):
            place = self._observed.pointer.channels[channel]
            if not place.connection or place.ring >= len(self._rings):  # the id is unused, or its ring is unknown
                continue
            of_handler = place.connection == lib.PROXYCCL_PLACE_HANDLER
            connection = None if of_handler else place.connection - 1
            counters = self._counters[channel]
            channels.append(
                ChannelView.of(counters, id=channel, ring=place.ring, worker=place.worker, connection=connection)
            )
        return channels


def snapshots(job: str | None = None, process: int | None = None) -> dict[Path, ServiceView]:
    """Returns the services' states by the paths of their publications. See `find` for the arguments and the errors."""
    views = {}
    for path, publication in find(job, process=process):
        with contextlib.suppress(ArgumentError), Observer(publication) as observer:  # the service may have closed
            views[path] = observer.snapshot()
    return views
