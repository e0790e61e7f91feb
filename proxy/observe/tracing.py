"""The trace of a service: asking its workers for records (engine/observe.h), fetching and reading them."""

from __future__ import annotations

import fcntl
import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

from proxyccl.device.errors import ResourceError
from proxyccl.proxy import _engine
from proxyccl.proxy.observe.publications import Publication
from proxyccl.proxy.observe.reader import Observer
from proxyccl.proxy.trigger import PARITY_SHIFT, Operation, Trigger

ffi, lib = _engine.ffi, _engine.lib

_LEASE_NS = 2_000_000_000
"""For how long a worker goes on to record for an observer that is not there any more."""

_CHANNELS_EVERY_NS = 100_000_000
"""Between two looks at which channels there are, which take longer than fetching does."""

_PARITY = 1 << PARITY_SHIFT
_KIND = (1 << lib.PROXYCCL_MARK_BITS) - 1
_NUMBER = (1 << lib.PROXYCCL_MARK_SHIFT) - 1
_TICKET = (1 << 48) - 1


@dataclass(slots=True)
class TracedTrigger:
    """What became of one trigger. Times are those of CLOCK_MONOTONIC in nanoseconds.

    Triggers that a worker acted on within one look at the clock divide its time evenly among them.

    Attributes:
        worker: which acted on it.
        ring: number of the ring that it came through.
        ticket: its ticket there.
        trigger: what it said.
        seen_ns: when the worker found it.
        issued_ns: when the worker was done with it, and looked for the next.
        completed_ns: when the worker found its work complete, or its handler returned; None where that is not known.
    """

    worker: int
    ring: int
    ticket: int
    trigger: Trigger
    seen_ns: int
    issued_ns: int
    completed_ns: int | None = None


@dataclass(frozen=True)
class ServiceTrace:
    """The trace of one service.

    Attributes:
        publication: whose it is.
        triggers: in the order in which they were issued, worker by worker.
        ways: for each channel that was in use its peer and transport; None and "handler" for a handler's.
        lost: records, at least, that were written over before they were fetched, or never written.
    """

    publication: Publication
    triggers: list[TracedTrigger]
    ways: dict[int, tuple[int | None, str]]
    lost: int


class TraceDecoder:
    """Makes triggers of the records of one worker.

    Args:
        worker: its number.
        connections: the connection of each channel, kept up to date by the caller; None for a handler's.
    """

    def __init__(self, worker: int, connections: dict[int, int | None]) -> None:
        self._worker = worker
        self._connections = connections
        self._ring = 0
        self._ticket: int | None = None  # of the next trigger; None: it is not known which that is
        self._looked = 0
        self._unissued: list[TracedTrigger] = []
        self._outstanding: dict[int, deque[TracedTrigger]] = {}  # by connection
        self._handled: dict[int, TracedTrigger] = {}  # by channel
        self.triggers: list[TracedTrigger] = []
        self.lost = 0

    def skip(self, lost: int) -> None:
        """Some records are missing before those that come next. What became of the triggers before stays unknown."""
        self.lost += lost + len(self._unissued)
        self._unissued.clear()
        self._outstanding.clear()
        self._handled.clear()
        self._ticket = None

    def feed(self, records: list[list[int]]) -> None:
        """Reads records, each of two words."""
        for word0, word1 in records:
            if word1 & _PARITY:
                self._mark(word1 >> lib.PROXYCCL_MARK_SHIFT & _KIND, word1 & _NUMBER, word0)
            elif self._ticket is None:
                self.lost += 1
            else:
                trigger = Trigger.decode(word0, word1)
                self._unissued.append(TracedTrigger(self._worker, self._ring, self._ticket, trigger, 0, 0))
                self._ticket += 1

    def _mark(self, kind: int, number: int, now: int) -> None:
        if kind == lib.PROXYCCL_MARK_SEEN:
            self._ring, self._ticket, self._looked = number >> 48, number & _TICKET, now
        elif kind == lib.PROXYCCL_MARK_ISSUED:
            self._issued(now)
        elif kind == lib.PROXYCCL_MARK_COMPLETED:
            done = self._outstanding.get(number >> 32, deque())
            while len(done) > number & 0xFFFFFFFF:
                done.popleft().completed_ns = now
        elif kind == lib.PROXYCCL_MARK_HANDLED and number in self._handled:
            self._handled.pop(number).completed_ns = now

    def _issued(self, now: int) -> None:
        took, count = now - self._looked, len(self._unissued)
        for i, traced in enumerate(self._unissued):
            traced.seen_ns = self._looked + took * i // count
            traced.issued_ns = self._looked + took * (i + 1) // count
            connection = self._connections.get(traced.trigger.channel)
            if connection is None:
                self._handled[traced.trigger.channel] = traced
            else:
                self._outstanding.setdefault(connection, deque()).append(traced)
        self.triggers += self._unissued
        self._unissued = []
        self._looked = now


class Tracer:
    """Records what a service does, from its construction to `stop`. One at a time for each service.

    Args:
        path: the file of its publication.
        publication: the same, read.

    Raises:
        ResourceError: another observer traces it.
        ArgumentError: the service is gone.
    """

    def __init__(self, path: Path, publication: Publication) -> None:
        who = publication.description
        self._observer = Observer(publication, writable=True)
        try:
            self._lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                raise ResourceError(f"rank {who.rank} of job {who.job} is being traced by another process") from None
        except (OSError, ResourceError) as error:
            self._observer.close()
            if isinstance(error, OSError):
                raise ResourceError(f"rank {who.rank} of job {who.job} can't be traced: {error.strerror}") from None
            raise
        self._stats = [self._observer.worker_stats(number) for number in range(publication.workers)]
        self._next = [ffi.new("uint64_t *", stats.traced) for stats in self._stats]
        self._connections: list[dict[int, int | None]] = [{} for _ in self._stats]
        self._ways: dict[int, tuple[int | None, str]] = {}
        self._records: list[list[tuple[int, bytes]]] = [[] for _ in self._stats]  # what was lost, and what came then
        self._buffer = ffi.new("ProxycclTraceRecord[]", lib.PROXYCCL_TRACE_RECORDS)
        self._note_channels()
        self._ask_until(time.monotonic_ns() + _LEASE_NS)

    def __enter__(self) -> Tracer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask_until(self, moment_ns: int) -> None:
        for stats in self._stats:
            stats.trace_until = moment_ns

    def fetch(self) -> None:
        """Fetches what there is, and asks for more. To be called many times a second."""
        for stats, records in zip(self._stats, self._records, strict=True):
            if stats.trace_until == 0:  # this process was stopped for longer than the worker waits
                records.append((1, b""))
        self._ask_until(time.monotonic_ns() + _LEASE_NS)
        self._fetch()
        if time.monotonic_ns() > self._channels_known_ns + _CHANNELS_EVERY_NS:
            self._note_channels()

    def _fetch(self) -> None:
        lost = ffi.new("uint64_t *")
        for stats, at, records in zip(self._stats, self._next, self._records, strict=True):
            lost[0] = 0
            count = lib.proxyccl_trace_read(stats, at, self._buffer, lib.PROXYCCL_TRACE_RECORDS, lost)
            if count or lost[0]:
                records.append((int(lost[0]), bytes(ffi.buffer(self._buffer, 16 * count))))

    def _note_channels(self) -> None:
        view = self._observer.look()
        self._channels_known_ns = view.time_ns
        for channel in view.channels:
            connection = view.connection_of(channel)
            self._connections[channel.worker][channel.id] = channel.connection
            self._ways[channel.id] = (connection.peer, connection.transport) if connection else (None, "handler")

    def stop(self) -> ServiceTrace:
        """Ends the recording, and reads it."""
        self._ask_until(0)
        self._fetch()
        self._note_channels()
        triggers: list[TracedTrigger] = []
        lost = 0
        for number, parts in enumerate(self._records):
            decoder = TraceDecoder(number, self._connections[number])
            for lost_before, data in parts:
                if lost_before:
                    decoder.skip(lost_before)
                decoder.feed(np.frombuffer(data, np.uint64).reshape(-1, 2).tolist())
            triggers += decoder.triggers
            lost += decoder.lost
        return ServiceTrace(self._observer.publication, triggers, self._ways, lost)

    def close(self) -> None:
        """Ends the recording if `stop` has not, and lets others trace the service."""
        self._ask_until(0)
        self._stats.clear()
        os.close(self._lock)
        self._observer.close()


def operation_name(operation: Operation) -> str:
    """An operation in words, such as "put + signal"."""
    names = {Operation.DATA: "put", Operation.SIGNAL: "signal", Operation.FLUSH: "flush"}
    return " + ".join(name for bit, name in names.items() if operation & bit) or "custom"
