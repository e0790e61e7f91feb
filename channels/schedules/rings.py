"""Schedules as streams ring them: what a stream does for one call, the numbers of its schedules, and when they go."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

from proxyccl.channels.group import Group
from proxyccl.device.runtime import Event
from proxyccl.device.stream_operations import Operation, StreamOperations, WaitValue, WriteValue
from proxyccl.proxy.schedule import Schedule

Step = Operation | Schedule
"""The next step of a stream; a schedule is rung."""

_MOST_DROPPED = 1024


class ScheduleRings:
    """Gives schedules to the proxy, and takes back those that streams can no longer ring.

    A graph that was captured may ring its schedules as long as it lives, which nobody can know: those schedules stay.

    Attributes:
        words: through which streams, kernels and the proxy meet.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.words = group.links.proxy.schedule_pointers
        self._dropped: list[tuple[Any, list[int]]] = []  # what was issued in C, and its schedules

    def stage(self, number: int, least: int) -> Operation:
        """Waits, within a schedule, until the word of a stage is at least this."""
        return WaitValue(self.words.stages[number], least)

    def end(self, stages: Collection[int] = (), *, gated: bool = False) -> list[Operation]:
        """Waits for the end of the schedule, and resets the words that it and the stream have written.

        Args:
            stages: numbers of the stages that no kernel resets. Each is a write of the stream, which takes time.
            gated: whether the gate was used.
        """
        words = self.words
        used = [words.done, *(words.stages[stage] for stage in stages), *([words.gate] if gated else [])]
        return [WaitValue(words.done, 1), *(WriteValue(word, 0) for word in used)]

    def prepare(self, steps: Sequence[Step]) -> StreamOperations:
        """The operations of a stream, with schedules' numbers in place of the schedules.

        Raises:
            ResourceError: no numbers are left.
            ProxyLostError: the daemon that runs the proxy is lost.
        """
        self._remove_dropped()
        proxy = self._group.links.proxy
        numbers: list[int] = []
        operations: list[Operation] = []
        for step in steps:
            if isinstance(step, Schedule):
                numbers.append(proxy.add_schedule(step))
                operations.append(WriteValue(self.words.bell, numbers[-1]))
            else:
                operations.append(step)
        ring = StreamOperations(self._group.runtime, operations, sleepers=proxy.sleepers if numbers else None)
        weakref.finalize(ring, self._dropped.append, (ring.prepared, numbers)).atexit = False
        return ring

    def _remove_dropped(self) -> None:
        """Removes schedules once there are many, as it waits for all that was rung."""
        last = self._group.launches.last_stream
        if len(self._dropped) < _MOST_DROPPED or last is None or self._group.runtime.is_capturing(last):
            return
        dropped = self._dropped[:_MOST_DROPPED]
        del self._dropped[:_MOST_DROPPED]  # others may be dropped meanwhile
        event: Event = self._group.runtime.create_event()
        event.record(last)
        event.synchronize()
        for prepared, numbers in dropped:
            for number in () if prepared.captured else numbers:
                self._group.links.proxy.remove_schedule(number)
