"""A service's shared memory: the words of its channels and schedules, and the limits of registered memories."""

from __future__ import annotations

from typing import Any

from proxyccl.device.errors import ArgumentError, ClosedError
from proxyccl.device.runtime import PinnedMemory
from proxyccl.proxy import _engine
from proxyccl.proxy.interface import ChannelCounters
from proxyccl.proxy.schedule import STAGES, SchedulePointers
from proxyccl.proxy.trigger import MAX_CHANNELS, MAX_MEMORIES

ffi = _engine.ffi

_COUNTERS_BYTES: int = ffi.sizeof("ProxycclCounters") * MAX_CHANNELS
_FLUSHED_BYTES = _COMPLETED_BYTES = 8 * MAX_CHANNELS
_MEMORY_LIMITS_BYTES = 8 * MAX_MEMORIES
_SCHEDULE_BYTES: int = ffi.sizeof("ProxycclScheduleWords")


class SharedWords:
    """Arrays with one word or one struct for each channel or memory id.

    Args:
        memory: pinned memory, with `BYTES` zeroed bytes from `offset` on.
        offset: offset in `memory`, in bytes.

    Attributes:
        table: the ProxycclCounters of the channels.
        memory_limits: for each memory id, the bytes from the id's first byte to the memory's end; 0 for an unused id.
        schedule_words: the ProxycclScheduleWords.
    """

    BYTES = _COUNTERS_BYTES + _FLUSHED_BYTES + _COMPLETED_BYTES + _MEMORY_LIMITS_BYTES + _SCHEDULE_BYTES

    def __init__(self, memory: PinnedMemory, offset: int) -> None:
        self.memory = memory
        self._offset = offset
        self._flushed_offset = offset + _COUNTERS_BYTES
        self._completed_offset = self._flushed_offset + _FLUSHED_BYTES
        self._memory_limits_offset = self._completed_offset + _COMPLETED_BYTES
        self.table: Any = ffi.cast("ProxycclCounters *", memory.host_ptr + offset)
        self._schedule_offset = self._memory_limits_offset + _MEMORY_LIMITS_BYTES
        self.memory_limits: Any = ffi.cast("uint64_t *", memory.host_ptr + self._memory_limits_offset)
        self.schedule_words: Any = ffi.cast("ProxycclScheduleWords *", memory.host_ptr + self._schedule_offset)

    @property
    def counters_handle(self) -> bytes:
        """The handle by which other processes open the counters."""
        return self.memory.export(self.memory.host_ptr + self._offset, _COUNTERS_BYTES)

    def flushed_pointer(self, channel: int) -> int:
        """The device's address of a channel's flush word."""
        return self.memory.ptr + self._flushed_offset + 8 * channel

    def flushed_host(self, channel: int) -> Any:
        """The CPU's pointer to the same word."""
        return ffi.cast("uint64_t *", self.memory.host_ptr + self._flushed_offset + 8 * channel)

    def flushed(self, channel: int) -> int:
        """One more than the ticket of the last completed flush of a channel."""
        return int(self.flushed_host(channel)[0])

    def completed_pointer(self, channel: int) -> int:
        """The device's address of the word that holds `completed`."""
        return self.memory.ptr + self._completed_offset + 8 * channel

    def completed_host(self, channel: int) -> Any:
        """The CPU's pointer to the same word."""
        return ffi.cast("uint64_t *", self.memory.host_ptr + self._completed_offset + 8 * channel)

    def completed(self, channel: int) -> int:
        """One more than the ticket up to which all triggers of a channel are complete."""
        if self.memory.closed:
            raise ClosedError("the proxy service is closed")
        return int(_engine.lib.proxyccl_word_acquire(self.completed_host(channel)))

    @property
    def schedule_pointers(self) -> SchedulePointers:
        """The device's addresses of `schedule_words`."""
        first = self.memory.ptr + self._schedule_offset
        bell, done, gate, stages = (
            first + ffi.offsetof("ProxycclScheduleWords", word) for word in ("bell", "done", "gate", "stages")
        )
        return SchedulePointers(bell, done, gate, tuple(stages + 8 * stage for stage in range(STAGES)))

    def end_waits(self) -> None:
        """Releases streams that wait for a schedule or its stages."""
        _engine.lib.proxyccl_schedule_words_end_waits(self.schedule_words)

    @property
    def memory_limits_pointer(self) -> int:
        """The device's address of `memory_limits`."""
        return self.memory.ptr + self._memory_limits_offset

    def counters(self, channel: int) -> ChannelCounters:
        """A channel's counters, read without disturbing the proxy.

        Raises:
            ArgumentError: there is no such id.
            ClosedError: the memory is unmapped.
        """
        if not 0 <= channel < MAX_CHANNELS:
            raise ArgumentError("channel", f"must be from 0 to {MAX_CHANNELS - 1}, not {channel}")
        if self.memory.closed:
            raise ClosedError("the proxy service is closed")
        c = self.table[channel]
        return ChannelCounters(c.triggers, c.puts, c.bytes, c.signals, c.flushes, c.gets)

    def clear(self, channel: int) -> None:
        """Zeroes the counters and words of an unused channel id, for the id's next channel."""
        self.table[channel] = ffi.new("ProxycclCounters *")[0]
        self.flushed_host(channel)[0] = self.completed_host(channel)[0] = 0
