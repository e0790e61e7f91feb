"""The trace of a service: asking its workers for records (engine/observe.h), fetching and reading them."""

from __future__ import annotations

import fcntl
import os
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from proxyccl.device.errors import ResourceError
from proxyccl.proxy import _engine
from proxyccl.proxy.observe.publications import Publication
from proxyccl.proxy.observe.reader import Observer
from proxyccl.proxy.trigger import PARITY_SHIFT, Trigger

ffi, lib = _engine.ffi, _engine.lib

_LEASE_NS = 2_000_000_000
"""For how long a worker goes on to record for an observer that is not there any more."""

_CHANNELS_EVERY_NS = 100_000_000
"""Between two looks at which channels there are, which take longer than fetching does."""

MOST_TRIGGERS = 500_000
"""That are kept unless another number is asked for: a file of some 250 MB at worst, which a browser still shows."""

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
        look: number of the worker's look at the clock.
        seen_ns: when the worker found it.
        issued_ns: when the worker was done with it, and looked for the next.
        completed_ns: when the worker found its work complete, or its handler returned; None where that is not known.
    """

    worker: int
    ring: int
    ticket: int
    trigger: Trigger
    look: int
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
        left_out: triggers that were fetched and not kept, as there were enough.
    """

    publication: Publication
    triggers: list[TracedTrigger]
    ways: dict[int, tuple[int | None, str]]
    lost: int
    left_out: int = 0


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
        self._look = 0
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
                traced = TracedTrigger(self._worker, self._ring, self._ticket, trigger, self._look, 0, 0)
                self._unissued.append(traced)
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
        self._look += 1


class Allowance:
    """How many triggers may still be kept, by tracers that share it: what they keep ends at about the same moment.

    Args:
        triggers: so many, and those that share a look at the clock with the last of them.
    """

    def __init__(self, triggers: int) -> None:
        self._left = triggers

    def end_of_kept(self, is_mark: npt.NDArray[np.bool_]) -> int | None:
        """How many records to keep of some that end with a mark; None: all.

        Args:
            is_mark: of each record whether it is a mark; the others are triggers.
        """
        triggers = np.flatnonzero(~is_mark)
        if len(triggers) <= self._left:
            self._left -= len(triggers)
            return None
        beyond = int(triggers[self._left])
        self._left = 0
        if beyond and is_mark[beyond - 1]:
            return beyond
        return beyond + int(np.argmax(is_mark[beyond:])) + 1  # the mark tells when those before were issued


class _Records:
    """What is fetched of a worker's records.

    Args:
        stats: the worker's ProxycclWorkerStats.
        allowance: for its triggers.
    """

    def __init__(self, stats: Any, allowance: Allowance) -> None:
        self._stats = stats
        self._allowance = allowance
        self._next = ffi.new("uint64_t *", stats.traced)
        self._parts: list[tuple[int, npt.NDArray[np.uint64]]] = []  # what was lost, and what came then
        self._full = False
        self.left_out = 0

    def ask_until(self, moment_ns: int) -> None:
        self._stats.trace_until = moment_ns

    def note_pause(self) -> None:
        """Notes a record as lost if the worker has not been asked for any, as this process was stopped for long."""
        if self._stats.trace_until == 0:
            self._add(1, np.empty((0, 2), np.uint64))

    def fetch(self, buffer: Any) -> None:
        """Fetches what there is."""
        lost = ffi.new("uint64_t *")
        count = lib.proxyccl_trace_read(self._stats, self._next, buffer, lib.PROXYCCL_TRACE_RECORDS, lost)
        if count or lost[0]:
            self._add(int(lost[0]), np.frombuffer(ffi.buffer(buffer, 16 * count), np.uint64).reshape(-1, 2))

    def _add(self, lost: int, records: npt.NDArray[np.uint64]) -> None:
        is_mark = (records[:, 1] & np.uint64(_PARITY)).astype(bool)
        end = 0 if self._full else self._allowance.end_of_kept(is_mark)
        if end is not None:
            self._full = True  # later marks speak of triggers that are not kept
            self.left_out += int(np.count_nonzero(~is_mark[end:]))
        if lost or end != 0:
            self._parts.append((lost, records[:end].copy()))

    def read_into(self, decoder: TraceDecoder) -> None:
        """Has a decoder read what is kept."""
        for lost_before, records in self._parts:
            if lost_before:
                decoder.skip(lost_before)
            decoder.feed(records.tolist())


class Tracer:
    """Records what a service does, from its construction, and then each worker's next look at its rings, to `stop`. One
    at a time for each service.

    Args:
        path: the file of its publication.
        publication: the same, read.
        allowance: how many triggers to keep, with others that have the same; None: `MOST_TRIGGERS`.

    Raises:
        ResourceError: another observer traces it.
        ArgumentError: the service is gone.
    """

    def __init__(self, path: Path, publication: Publication, allowance: Allowance | None = None) -> None:
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
        allowance = allowance or Allowance(MOST_TRIGGERS)
        stats = [self._observer.worker_stats(number) for number in range(publication.workers)]
        self._workers = [_Records(each, allowance) for each in stats]
        self._connections: list[dict[int, int | None]] = [{} for _ in stats]
        self._ways: dict[int, tuple[int | None, str]] = {}
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
        for worker in self._workers:
            worker.ask_until(moment_ns)

    def fetch(self) -> None:
        """Fetches what there is, and asks for more. To be called many times a second."""
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
        for number, worker in enumerate(self._workers):
            decoder = TraceDecoder(number, self._connections[number])
            worker.read_into(decoder)
            triggers += decoder.triggers
            lost += decoder.lost
        left_out = sum(worker.left_out for worker in self._workers)
        return ServiceTrace(self._observer.publication, triggers, self._ways, lost, left_out)

    def close(self) -> None:
        """Ends the recording if `stop` has not, and lets others trace the service."""
        self._ask_until(0)
        self._workers.clear()
        os.close(self._lock)
        self._observer.close()
