"""What a service's memory says at a moment: the observer's side of engine/observe.h and of the counters.

It opens what a publication names and disturbs nobody: it writes nothing, and how full a ring is it finds by a few looks
at its slots.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from proxyccl.device._native import lib as native
from proxyccl.device.errors import ArgumentError
from proxyccl.device.shared_memory import open_descriptor
from proxyccl.proxy import _engine, ring_contents
from proxyccl.proxy.observe.publications import Publication, RingPlace
from proxyccl.proxy.observe.segment import observed_bytes, outstanding_in
from proxyccl.proxy.trigger import MAX_CHANNELS, PARITY_SHIFT, full_parity

ffi, lib = _engine.ffi, _engine.lib


@dataclass(frozen=True)
class WorkerView:
    """What a worker did since it began.

    Attributes:
        number: its number in its service.
        looks: at its rings and connections.
        age_ns: since it began; 0 when it has ended.
        idle_ns: of that time, when its thread had nothing to do, for any worker that shares it.
        sleeps: in that time.
        slept_ns: of that time.
    """

    number: int
    looks: int
    age_ns: int
    idle_ns: int
    sleeps: int
    slept_ns: int


@dataclass(frozen=True)
class RingView:
    """A ring.

    Attributes:
        number: its number in its service.
        worker: which drains it.
        size: slots.
        taken: triggers taken out of it since it was made.
        full: slots that hold a trigger now.
    """

    number: int
    worker: int
    size: int
    taken: int
    full: int


@dataclass(frozen=True)
class ConnectionView:
    """A way to one peer.

    Attributes:
        worker: which it belongs to.
        number: its number in that worker.
        peer: the rank that it leads to, or None where nobody said.
        transport: the transport's name.
        completed: triggers that were seen to be complete.
        outstanding: triggers that are not, as of the worker's last poll.
        errors: failures.
    """

    worker: int
    number: int
    peer: int | None
    transport: str
    completed: int
    outstanding: int
    errors: int


@dataclass(frozen=True)
class ChannelView:
    """A channel.

    Attributes:
        id: its id in its service.
        ring: number of the ring that its triggers come through.
        worker: which acts on them.
        connection: number, in that worker, of the way that they take; None for a Python handler.
        triggers: acted on, of all operations; and of these:
        puts: how many moved data.
        bytes: that they moved.
        signals: how many signalled.
        flushes: how many flushed.
        flush_ns: from issue to completion of flushes, all together …
        timed_flushes: … of so many: those that had something to wait for, one at a time for each connection.
        errors: triggers that failed.
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


@dataclass(frozen=True)
class ServiceView:
    """A service at a moment.

    Attributes:
        publication: who it is.
        time_ns: the moment, by CLOCK_MONOTONIC.
        workers: by number.
        rings: by number.
        connections: by worker and number.
        channels: those in use, by id.
    """

    publication: Publication
    time_ns: int
    workers: tuple[WorkerView, ...]
    rings: tuple[RingView, ...]
    connections: tuple[ConnectionView, ...]
    channels: tuple[ChannelView, ...]

    def connection_of(self, channel: ChannelView) -> ConnectionView | None:
        """The way that a channel's triggers take, if it is no handler's."""
        place = (channel.worker, channel.connection)
        return next((each for each in self.connections if (each.worker, each.number) == place), None)


def _map(handle: str, nbytes: int, *, writable: bool) -> tuple[mmap.mmap, int]:
    """Maps what a handle of shared memory names. Returns the mapping and where in it the range begins.

    Raises:
        ArgumentError: it can't be opened, or is shorter than `nbytes`.
    """
    try:
        packed = bytes.fromhex(handle)
    except ValueError:
        raise ArgumentError("handle", f"{handle[:40]!r} is no handle in hexadecimal") from None
    descriptor, offset, size = open_descriptor(packed)
    try:
        if size < nbytes:
            raise ArgumentError("handle", f"names {size} bytes, where {nbytes} are wanted")
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return mmap.mmap(descriptor, offset + size, access=access), offset
    finally:
        os.close(descriptor)


class _Mapped:
    """A struct in a mapping."""

    def __init__(self, handle: str, kind: str, nbytes: int, *, writable: bool = False) -> None:
        self._mapping, begin = _map(handle, nbytes, writable=writable)
        self._buffer = ffi.from_buffer(self._mapping, require_writable=writable)
        self.pointer = ffi.cast(f"{kind} *", self._buffer + begin)

    def close(self) -> None:
        """Unmaps it."""
        self.pointer = None
        ffi.release(self._buffer)
        self._mapping.close()


class OutstandingView(_Mapped):
    """What a service of another process has outstanding.

    Args:
        handle: of its `ObservedSegment`, in hexadecimal.
        workers: number of its workers.

    Raises:
        ArgumentError: the memory can't be opened, or is shorter.
    """

    def __init__(self, handle: str, workers: int) -> None:
        super().__init__(handle, "ProxycclObserved", observed_bytes(workers))

    def of(self, channel: int) -> int | None:
        """See `outstanding_in`."""
        return outstanding_in(self.pointer, channel)


class _Ring(_Mapped):
    """A ring, read only."""

    def __init__(self, place: RingPlace) -> None:
        self.size = 1 << place.size_log2
        self.size_log2 = place.size_log2
        super().__init__(place.handle, "uint64_t", (self.size * 2 + 1) * 8)
        self.slots_host = int(ffi.cast("uintptr_t", self.pointer))
        self.tail_host = self.slots_host + self.size * 16
        self._place = place

    def look(self, number: int) -> RingView:
        words, size = self.pointer, self.size
        taken = int(words[2 * size])

        def is_full(ahead: int) -> bool:
            ticket = taken + ahead
            parity = words[2 * (ticket % size) + 1] >> PARITY_SHIFT
            return bool(parity == full_parity(ticket, self.size_log2))

        return RingView(number, self._place.worker, size, taken, _count_leading(is_full, size))


def _count_leading(holds: Callable[[int], bool], size: int) -> int:
    """How many of 0 to size - 1 `holds` is true for, where it is for the first ones alone."""
    low, step = 0, 1
    while low + step <= size and holds(low + step - 1):
        low += step
        step *= 2
    while step > 1:
        step //= 2
        if low + step <= size and holds(low + step - 1):
            low += step
    return low


class Observer:
    """Looks at one service. Use it as a context manager, or call `close`.

    Args:
        publication: the service's.
        writable: its segment is wanted to be written, as for a trace; otherwise nothing is.

    Raises:
        ArgumentError: the service is gone, or what it published is not so.
    """

    def __init__(self, publication: Publication, *, writable: bool = False) -> None:
        self.publication = publication
        with contextlib.ExitStack() as opened:
            size = observed_bytes(publication.workers)
            self._observed = _Mapped(publication.observed, "ProxycclObserved", size, writable=writable)
            opened.callback(self._observed.close)
            counters_bytes = MAX_CHANNELS * ffi.sizeof("ProxycclCounters")
            self._counters = _Mapped(publication.counters, "ProxycclCounters", counters_bytes)
            opened.callback(self._counters.close)
            self._rings = []
            for place in publication.rings:
                self._rings.append(_Ring(place))
                opened.callback(self._rings[-1].close)
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

    def worker_stats(self, number: int) -> Any:
        """The ProxycclWorkerStats of a worker."""
        return self._observed.pointer.workers + number

    def look(self) -> ServiceView:
        """The service now."""
        now = time.monotonic_ns()
        workers = []
        connections = []
        for number in range(self.publication.workers):
            stats = self.worker_stats(number)
            age = max(0, now - stats.started_ns) if stats.started_ns else 0  # it has ended
            idle = min(stats.idle_ns, age)  # counted in steps, the last of which may be newer than `now`
            workers.append(WorkerView(number, stats.looks, age, idle, stats.sleeps, min(stats.slept_ns, idle)))
            connections += self._connections_of(number)
        return ServiceView(
            self.publication,
            now,
            tuple(workers),
            tuple(ring.look(number) for number, ring in enumerate(self._rings)),
            tuple(connections),
            tuple(self._channels()),
        )

    def look_into_rings(self, count: int) -> list[ring_contents.RingContents]:
        """Its rings now, with the triggers in them, at most `count` of each kind."""
        return [ring_contents.look(ring, count) for ring in self._rings]

    def _connections_of(self, worker: int) -> list[ConnectionView]:
        connections = []
        for number, stats in enumerate(self.worker_stats(worker).connections):
            if not stats.in_use:
                break
            completed = int(stats.completed)  # first: it follows the other
            peer = None if stats.peer == native.PROXYCCL_NO_PEER else int(stats.peer)
            transport = ffi.string(stats.transport).decode(errors="replace")
            outstanding = max(0, stats.issued - completed)
            connections.append(
                ConnectionView(worker, number, peer, transport, completed, outstanding, int(stats.errors))
            )
        return connections

    def _channels(self) -> list[ChannelView]:
        channels = []
        for channel in range(MAX_CHANNELS):
            place = self._observed.pointer.channels[channel]
            if not place.connection:
                continue
            of_handler = place.connection == lib.PROXYCCL_PLACE_HANDLER
            c = self._counters.pointer[channel]
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
                )
            )
        return channels
