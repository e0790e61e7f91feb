"""Traces a service: requests trace records from its workers (engine/observe.h), fetches and decodes the records."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from proxyccl.device.errors import ResourceError
from proxyccl.proxy import _engine
from proxyccl.proxy.observe.publications import Publication
from proxyccl.proxy.observe.reader import Observer
from proxyccl.proxy.trigger import PARITY_SHIFT, Trigger

ffi, lib = _engine.ffi, _engine.lib

_LEASE_NS = 2_000_000_000
"""The time in ns for which a worker keeps recording after its observer is gone."""

_CHANNELS_EVERY_NS = 100_000_000
"""The time in ns between two reads of the channels' list, which take longer than to fetch records."""

MOST_TRIGGERS = 500_000
"""The number of triggers kept by default: a trace file of at most about 250 MB, which a browser can still show."""

_PARITY = 1 << PARITY_SHIFT
_KIND = (1 << lib.PROXYCCL_MARK_BITS) - 1
_NUMBER = (1 << lib.PROXYCCL_MARK_SHIFT) - 1
_TICKET = (1 << 48) - 1


@dataclass(slots=True)
class TracedTrigger:
    """The history of one trigger, or of one send of a schedule. Times are those of CLOCK_MONOTONIC in nanoseconds.

    A send of a schedule does not pass through a ring, so it has a schedule instead of a ring and a ticket. If a worker
    handled several triggers between two clock readings, the time between the readings is divided evenly among the
    triggers.
    """

    worker: int  # the worker that handled the trigger
    ring: int | None  # number of the ring that the trigger came through; None for a send
    ticket: int | None  # the trigger's ticket in that ring; None for a send
    schedule: int | None  # number of the send's schedule; None for a trigger
    trigger: Trigger  # the trigger; for a send, a trigger that would have the same effect
    look: int  # number of the worker's clock reading; triggers with the same number were handled together
    seen_ns: int  # when the worker found the trigger
    issued_ns: int  # when the worker had issued the trigger's operations and looked for the next trigger
    # When the worker found the operations complete, or when the handler returned; None if unknown.
    completed_ns: int | None = None


@dataclass(frozen=True, slots=True)
class TracedWait:
    """A worker's wait for a peer in a schedule. Times are those of CLOCK_MONOTONIC in nanoseconds."""

    schedule: int  # the schedule's number
    channel: int  # id of the channel to the peer
    # Whether the worker waited for the peer to join the schedule; if not, the worker waited for the peer's data.
    joins: bool
    begin_ns: int  # when the worker began the schedule
    end_ns: int  # when the worker found that the peer had joined or the data had arrived


@dataclass(frozen=True)
class ServiceTrace:
    """The trace of one service."""

    publication: Publication
    # The triggers and the sends of schedules: worker by worker, and for each worker in the order in which they were
    # issued.
    triggers: list[TracedTrigger]
    # The peer and the transport of each channel in use; (None, "handler") for a handler's channel.
    routes: dict[int, tuple[int | None, str]]
    # A lower bound for the number of records that were overwritten before they were fetched, or that were never
    # written.
    lost: int
    left_out: int = 0  # number of triggers that were fetched but not kept, because the `Allowance` was used up
    # The waits of schedules: worker by worker, and for each worker in the order in which they ended.
    waits: list[TracedWait] = field(default_factory=list)


class TraceDecoder:
    """Decodes the records of one worker into triggers and waits. `connections`, which the caller keeps up to date, maps
    each channel to its connection, or to None for a handler's channel.
    """

    def __init__(self, worker: int, connections: dict[int, int | None]) -> None:
        self._worker = worker
        self._connections = connections
        self._ring: int | None = None
        self._ticket: int | None = None
        self._schedule: int | None = None  # number of the schedule to which the next send belongs
        self._looked = 0
        self._look = 0
        self._unissued: list[TracedTrigger] = []
        # `_outstanding` is keyed by connection; `_handled` and `_sent` (incomplete sends of schedules) are keyed by
        # channel.
        self._outstanding: dict[int, deque[TracedTrigger]] = {}
        self._handled: dict[int, TracedTrigger] = {}
        self._sent: dict[int, deque[TracedTrigger]] = {}
        self._begun: tuple[int, int] | None = None  # the running schedule, and its start time
        self.triggers: list[TracedTrigger] = []
        self.waits: list[TracedWait] = []
        self.lost = 0

    def skip(self, lost: int) -> None:
        """Notes that `lost` records are missing here, so the completion of earlier triggers stays unknown."""
        self.lost += lost + len(self._unissued)
        self._unissued.clear()
        self._outstanding.clear()
        self._handled.clear()
        self._sent.clear()
        self._ring = self._ticket = self._schedule = self._begun = None

    def feed(self, records: list[list[int]]) -> None:
        for word0, word1 in records:
            if word1 & _PARITY:
                self._mark(word1 >> lib.PROXYCCL_MARK_SHIFT & _KIND, word1 & _NUMBER, word0)
            elif self._ticket is None and self._schedule is None:
                self.lost += 1
            else:
                source = (self._ring, self._ticket, self._schedule)
                traced = TracedTrigger(self._worker, *source, Trigger.decode(word0, word1), self._look, 0, 0)
                self._unissued.append(traced)
                if self._ticket is not None:
                    self._ticket += 1

    def _mark(self, kind: int, number: int, now: int) -> None:
        if kind == lib.PROXYCCL_MARK_SEEN:
            self._ring, self._ticket, self._schedule, self._looked = number >> 48, number & _TICKET, None, now
        elif kind == lib.PROXYCCL_MARK_SCHEDULE:
            self._ring, self._ticket, self._schedule, self._looked = None, None, number, now
        elif kind == lib.PROXYCCL_MARK_ISSUED:
            self._issued(now)
        elif kind == lib.PROXYCCL_MARK_COMPLETED:
            done = self._outstanding.get(number >> 32, deque())
            while len(done) > number & 0xFFFFFFFF:
                done.popleft().completed_ns = now
        elif kind == lib.PROXYCCL_MARK_HANDLED and number in self._handled:
            self._handled.pop(number).completed_ns = now
        elif kind == lib.PROXYCCL_MARK_STEP:
            self._step(number >> lib.PROXYCCL_TRACED_STEP_SHIFT, number & 0xFFFFFFFF, now)

    def _step(self, kind: int, number: int, now: int) -> None:
        if kind == lib.PROXYCCL_TRACED_BEGIN:
            self._begun = number, now
        elif kind == lib.PROXYCCL_TRACED_SENT:
            if sent := self._sent.get(number):
                sent.popleft().completed_ns = now
        elif self._begun is not None:
            schedule, began = self._begun
            self.waits.append(TracedWait(schedule, number, kind == lib.PROXYCCL_TRACED_JOINED, began, now))

    def _issued(self, now: int) -> None:
        took, count = now - self._looked, len(self._unissued)
        for i, traced in enumerate(self._unissued):
            traced.seen_ns = self._looked + took * i // count
            traced.issued_ns = self._looked + took * (i + 1) // count
            connection = self._connections.get(traced.trigger.channel)
            if traced.schedule is not None:
                self._sent.setdefault(traced.trigger.channel, deque()).append(traced)
            elif connection is None:
                self._handled[traced.trigger.channel] = traced
            else:
                self._outstanding.setdefault(connection, deque()).append(traced)
        self.triggers += self._unissued
        self._unissued = []
        self._looked = now
        self._look += 1


class Allowance:
    """The number of triggers that several tracers may still keep. Tracers with a common `Allowance` stop keeping
    triggers at about the same moment. `triggers` is the number of triggers to keep. Further triggers are kept if they
    share a clock reading with the last kept trigger.
    """

    def __init__(self, triggers: int) -> None:
        self._left = triggers

    def end_of_kept(self, is_mark: npt.NDArray[np.bool_]) -> int | None:
        """Returns how many of the fetched records to keep, or None to keep all. `is_mark` states for each record
        whether it is a mark or a trigger; the last record is a mark.
        """
        triggers = np.flatnonzero(~is_mark)
        if len(triggers) <= self._left:
            self._left -= len(triggers)
            return None
        beyond = int(triggers[self._left])
        self._left = 0
        if beyond and is_mark[beyond - 1]:
            return beyond
        return beyond + int(np.argmax(is_mark[beyond:])) + 1  # the mark has the issue time of the triggers before it


class _Records:
    def __init__(self, stats: _engine.ProxycclWorkerStatsPointer, allowance: Allowance) -> None:
        self._stats = stats
        self._allowance = allowance
        self._next = ffi.new("uint64_t *", stats.traced)
        self._parts: list[tuple[int, npt.NDArray[np.uint64]]] = []  # number of lost records; the following records
        self._full = False
        self.left_out = 0

    def ask_until(self, moment_ns: int) -> None:
        self._stats.trace_until = moment_ns

    def note_pause(self) -> None:
        """Counts one lost record if the worker stopped recording because `ask_until` was not called in time."""
        if self._stats.trace_until == 0:
            self._add(1, np.empty((0, 2), np.uint64))

    def fetch(self, buffer: _engine.Array[_engine.ProxycclTraceRecord, _engine.ProxycclTraceRecordPointer]) -> None:
        lost = ffi.new("uint64_t *")
        count = lib.proxyccl_trace_read(self._stats, self._next, buffer, lib.PROXYCCL_TRACE_RECORDS, lost)
        if count or lost[0]:
            self._add(int(lost[0]), np.frombuffer(memoryview(ffi.buffer(buffer, 16 * count)), np.uint64).reshape(-1, 2))

    def _add(self, lost: int, records: npt.NDArray[np.uint64]) -> None:
        is_mark = (records[:, 1] & np.uint64(_PARITY)).astype(bool)
        end = 0 if self._full else self._allowance.end_of_kept(is_mark)
        if end is not None:
            self._full = True  # later marks can't be decoded without the triggers before them
            self.left_out += int(np.count_nonzero(~is_mark[end:]))
        if lost or end != 0:
            self._parts.append((lost, records[:end].copy()))

    def read_into(self, decoder: TraceDecoder) -> None:
        for lost_before, records in self._parts:
            if lost_before:
                decoder.skip(lost_before)
            decoder.feed(records.tolist())


class Tracer(contextlib.AbstractContextManager["Tracer"]):
    """Records a service's activity until `stop`. Only one tracer at a time can record a service. Each worker begins to
    record at the next poll of its rings. Raises ResourceError if another process traces the service, or the service's
    file is gone, and ArgumentError if the service has ended.

    Args:
        path: the file of the service's publication.
        allowance: the number of triggers to keep, shared with other tracers; None for `MOST_TRIGGERS` in this tracer.
    """

    def __init__(self, path: Path, publication: Publication, allowance: Allowance | None = None) -> None:
        who = publication.description
        with contextlib.ExitStack() as opened:
            self._observer = opened.enter_context(Observer(publication))
            try:
                lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                opened.callback(os.close, lock)
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ResourceError(f"rank {who.rank} of job {who.job} is being traced by another process") from None
            except OSError as error:
                raise ResourceError(f"cannot trace rank {who.rank} of job {who.job}: {error.strerror}") from None
            self._opened = opened.pop_all()
        allowance = allowance or Allowance(MOST_TRIGGERS)
        stats = [self._observer.worker_stats(number) for number in range(publication.workers)]
        self._workers = [_Records(each, allowance) for each in stats]
        self._connections: list[dict[int, int | None]] = [{} for _ in stats]
        self._routes: dict[int, tuple[int | None, str]] = {}
        self._buffer = ffi.new("ProxycclTraceRecord[]", lib.PROXYCCL_TRACE_RECORDS)
        self._note_channels()
        self._ask_until(time.monotonic_ns() + _LEASE_NS)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _ask_until(self, moment_ns: int) -> None:
        for worker in self._workers:
            worker.ask_until(moment_ns)

    def fetch(self) -> None:
        """Fetches new records, and extends the time in which workers record. Must be called many times per second."""
        for worker in self._workers:
            worker.note_pause()
        self._ask_until(time.monotonic_ns() + _LEASE_NS)
        self._fetch()
        if time.monotonic_ns() > self._channels_known_ns + _CHANNELS_EVERY_NS:
            self._note_channels()

    def _fetch(self) -> None:
        for worker in self._workers:
            worker.fetch(self._buffer)

    def _note_channels(self) -> None:
        view = self._observer.snapshot()
        self._channels_known_ns = view.time_ns
        for channel in view.channels:
            connection = view.connection_of(channel)
            self._connections[channel.worker][channel.id] = channel.connection
            self._routes[channel.id] = (connection.peer, connection.transport) if connection else (None, "handler")

    def stop(self) -> ServiceTrace:
        """Ends the recording, decodes the records and returns the trace."""
        self._ask_until(0)
        self._fetch()
        self._note_channels()
        triggers: list[TracedTrigger] = []
        waits: list[TracedWait] = []
        lost = 0
        for number, worker in enumerate(self._workers):
            decoder = TraceDecoder(number, self._connections[number])
            worker.read_into(decoder)
            triggers += decoder.triggers
            waits += decoder.waits
            lost += decoder.lost
        left_out = sum(worker.left_out for worker in self._workers)
        return ServiceTrace(self._observer.publication, triggers, self._routes, lost, left_out, waits)

    def close(self) -> None:
        """Ends the recording, unless `stop` has done so, and lets other processes trace the service."""
        self._ask_until(0)
        self._workers.clear()
        self._opened.close()
