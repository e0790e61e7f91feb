"""Reads and writes a service's shared memory (ProxycclSharedWords in engine/engine.h), and checks that the service's
workers keep polling their rings.
"""

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
"""The most seconds that one check adds to a wait: if the checking process was stopped as well, the time for which it
was stopped does not count against the workers.
"""


class SharedWords:
    """A ProxycclSharedWords (engine/engine.h) at `offset` in pinned memory, in `BYTES` bytes that the caller has
    zeroed. The attribute `table` is its array of counters; the other attributes have the names of its fields.
    """

    BYTES: int = ffi.sizeof("ProxycclSharedWords")

    def __init__(self, memory: PinnedMemory, offset: int) -> None:
        self.memory = memory
        self._offset = offset
        words: Any = ffi.cast("ProxycclSharedWords *", memory.host_ptr + offset)
        self.table, self.flushed, self.completed = words.counters, words.flushed, words.completed
        self.memory_limits = words.memory_limits
        self.schedule_words: Any = ffi.addressof(words, "schedule")  # the ProxycclScheduleWords

    def on_device(self, word: Any) -> int:
        """Returns the device's address of a word."""
        return self.memory.ptr + int(ffi.cast("uintptr_t", word)) - self.memory.host_ptr

    @property
    def counters_handle(self) -> bytes:
        """The handle with which other processes open the counters."""
        return self.memory.export(self.memory.host_ptr + self._offset, ffi.sizeof(self.table))

    def require_open(self) -> None:
        """Raises ClosedError if the memory is unmapped."""
        if self.memory.closed:
            raise ClosedError("the proxy service is closed")

    def counters(self, channel: int) -> ChannelCounters:
        if not 0 <= channel < MAX_CHANNELS:
            raise ArgumentError("channel", f"must be from 0 to {MAX_CHANNELS - 1}, not {channel}")
        self.require_open()
        return ChannelCounters.of(self.table[channel])

    def clear(self, channel: int) -> None:
        """Zeroes the counters and words of an unused channel id, for the id's next channel."""
        self.table[channel] = ffi.new("ProxycclCounters *")[0]
        self.flushed[channel] = self.completed[channel] = 0


class ProxyWords:
    """The methods of a proxy that use only its shared words, `words`. So these methods run in the rank's process even
    if the workers run in the daemon.
    """

    words: SharedWords

    def _words_of(self, channel: int) -> SharedWords:
        return self.words

    def flushed(self, channel: int) -> int:
        """Returns one more than the ticket of a channel's last completed flush."""
        return int(self._words_of(channel).flushed[channel])

    def flushed_pointer(self, channel: int) -> int:
        """Returns the device's address of a channel's flush word."""
        words = self._words_of(channel)
        return words.on_device(words.flushed + channel)

    def completed(self, channel: int) -> int:
        """Returns a ticket: all triggers of the channel with smaller tickets are known to be complete. A handler's
        trigger is complete when the handler has returned. The effects of complete triggers are visible to the caller.
        """
        words = self._words_of(channel)
        words.require_open()
        return int(lib.proxyccl_word_acquire(words.completed + channel))

    def completed_pointer(self, channel: int) -> int:
        """Returns the device's address of the word that holds `completed`."""
        words = self._words_of(channel)
        return words.on_device(words.completed + channel)

    def counters(self, channel: int) -> ChannelCounters:
        """Reads a channel's counters, without disturbing the proxy. Raises ArgumentError if there is no such channel
        id, and ClosedError if the memory is unmapped.
        """
        return self._words_of(channel).counters(channel)

    @property
    def memory_limits_pointer(self) -> int:
        """The device's address of a table that has, for each memory id, the bytes from the id's first byte to the
        memory's end.
        """
        return self.words.on_device(self.words.memory_limits)

    @property
    def schedule_pointers(self) -> SchedulePointers:
        """The device's addresses of the words with which streams start schedules."""
        words, on_device = self.words.schedule_words, self.words.on_device
        bell, done, gate = (on_device(ffi.addressof(words, name)) for name in ("bell", "done", "gate"))
        return SchedulePointers(bell, done, gate, tuple(on_device(words.stages + i) for i in range(STAGES)))

    def end_waits(self) -> None:
        """After a failure, releases the streams that wait for schedules or stages and that no worker releases."""
        lib.proxyccl_schedule_words_end_waits(self.words.schedule_words)


class TurnWatch:
    """Measures how long a worker has not polled its rings while a stream or a process waited for the workers. A worker
    does not poll if its process is stopped or a driver call hangs. One thread calls `look` every few milliseconds. The
    workers count their polls (called turns) in a ProxycclScheduleWords.
    """

    def __init__(self, schedule_words: Any, workers: int) -> None:
        self._words = schedule_words
        self._counts = [0] * workers
        self._idle = [0.0] * workers
        self._looked = time.monotonic()

    def look(self, *, awaited: bool = True) -> float:
        """Returns the longest time, in seconds, since a running worker last polled its rings. If `awaited` is False, no
        stream or process waits for the workers, so all times restart at 0.
        """
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _LONGEST_STEP), now
        for worker, before in enumerate(self._counts):
            self._counts[worker] = count = self._words.turns[worker].count
            idles = awaited and count == before and count != lib.PROXYCCL_NO_MORE_TURNS
            self._idle[worker] = self._idle[worker] + passed if idles else 0.0
        return max(self._idle)

    def look_for_streams(self) -> float:
        """Does the same as `look`, but returns 0 unless a stream waits for a schedule."""
        return self.look(awaited=bool(self._words.bell or self._words.running))
