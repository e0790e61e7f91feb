"""A service's shared memory (ProxycclSharedWords in engine/engine.h), and a check whether its workers take turns."""

from __future__ import annotations

import time
from typing import Any

from proxyccl.device.errors import ArgumentError, ClosedError
from proxyccl.device.runtime import PinnedMemory
from proxyccl.proxy import _engine
from proxyccl.proxy.interface import ChannelCounters
from proxyccl.proxy.schedule import STAGES, SchedulePointers
from proxyccl.proxy.trigger import MAX_CHANNELS

ffi, lib = _engine.ffi, _engine.lib

_LONGEST_STEP = 0.25
"""Seconds that one check counts at most: if the checking process was stopped too, that does not count against the
workers."""


class SharedWords:
    """A ProxycclSharedWords in pinned memory, from `offset` on, with `BYTES` zeroed bytes.

    Attributes:
        table: the ProxycclCounters of the channels.
        memory_limits: for each memory id, the bytes from the id's first byte to the memory's end; 0 for an unused id.
        schedule_words: the ProxycclScheduleWords.
    """

    BYTES: int = ffi.sizeof("ProxycclSharedWords")

    def __init__(self, memory: PinnedMemory, offset: int) -> None:
        self.memory = memory
        self._offset = offset
        self._words: Any = ffi.cast("ProxycclSharedWords *", memory.host_ptr + offset)
        self.table, self.memory_limits = self._words.counters, self._words.memory_limits
        self.schedule_words: Any = ffi.addressof(self._words, "schedule")

    def _on_device(self, word: Any) -> int:
        """The device's address of a word."""
        return self.memory.ptr + int(ffi.cast("uintptr_t", word)) - self.memory.host_ptr

    @property
    def counters_handle(self) -> bytes:
        """The handle by which other processes open the counters."""
        return self.memory.export(self.memory.host_ptr + self._offset, ffi.sizeof(self.table))

    def flushed_pointer(self, channel: int) -> int:
        return self._on_device(self.flushed_host(channel))

    def flushed_host(self, channel: int) -> Any:
        """The CPU's pointer to a channel's flush word."""
        return self._words.flushed + channel

    def flushed(self, channel: int) -> int:
        return int(self._words.flushed[channel])

    def completed_pointer(self, channel: int) -> int:
        return self._on_device(self.completed_host(channel))

    def completed_host(self, channel: int) -> Any:
        """The CPU's pointer to the word that holds `completed`."""
        return self._words.completed + channel

    def completed(self, channel: int) -> int:
        self._require_open()
        return int(lib.proxyccl_word_acquire(self.completed_host(channel)))

    def _require_open(self) -> None:
        if self.memory.closed:
            raise ClosedError("the proxy service is closed")

    @property
    def schedule_pointers(self) -> SchedulePointers:
        words = self.schedule_words
        bell, done, gate = (self._on_device(ffi.addressof(words, name)) for name in ("bell", "done", "gate"))
        return SchedulePointers(bell, done, gate, tuple(self._on_device(words.stages + i) for i in range(STAGES)))

    def end_waits(self) -> None:
        lib.proxyccl_schedule_words_end_waits(self.schedule_words)

    @property
    def memory_limits_pointer(self) -> int:
        return self._on_device(self.memory_limits)

    def counters(self, channel: int) -> ChannelCounters:
        """Raises ArgumentError if there is no such id, and ClosedError if the memory is unmapped."""
        if not 0 <= channel < MAX_CHANNELS:
            raise ArgumentError("channel", f"must be from 0 to {MAX_CHANNELS - 1}, not {channel}")
        self._require_open()
        return ChannelCounters.of(self.table[channel])

    def clear(self, channel: int) -> None:
        """Zeroes the counters and words of an unused channel id, for the id's next channel."""
        self.table[channel] = ffi.new("ProxycclCounters *")[0]
        self._words.flushed[channel] = self._words.completed[channel] = 0


class TurnWatch:
    """Measures how long a waiter has waited while one of some workers took no turn, because the workers' process is
    stopped or a driver call hangs. Used by one thread, which checks every few milliseconds. A worker counts its turns
    in a ProxycclScheduleWords, so the check costs the proxy nothing.
    """

    def __init__(self, schedule_words: Any, workers: int) -> None:
        self._words = schedule_words
        self._counts = [0] * workers
        self._idle = [0.0] * workers
        self._looked = time.monotonic()

    def look(self, *, awaited: bool = True) -> float:
        """The longest time, in seconds, for which a worker that has not ended has taken no turn. Restarts at 0 unless
        the caller's work is `awaited`.
        """
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _LONGEST_STEP), now
        for worker, before in enumerate(self._counts):
            self._counts[worker] = count = self._words.turns[worker].count
            idles = awaited and count == before and count != lib.PROXYCCL_NO_MORE_TURNS
            self._idle[worker] = self._idle[worker] + passed if idles else 0.0
        return max(self._idle)

    def look_for_streams(self) -> float:
        """Like `look`, but returns 0 unless a stream waits for a schedule."""
        return self.look(awaited=bool(self._words.bell or self._words.running))
