"""How streams start schedules: the operations of a stream for one call, and the adding and removing of numbered
schedules.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

from proxyccl.channels.group import Group
from proxyccl.device.runtime import Event
from proxyccl.device.stream_operations import Operation, StreamOperations, WaitValue, WriteValue
from proxyccl.proxy.schedule import Schedule

Step = Operation | Schedule
"""A step of a stream: it rings a `Schedule`, or carries out an `Operation`."""

_MOST_DROPPED = 1024


class ScheduleRings:
    """Adds schedules to the proxy, and removes schedules that streams can no longer ring.

    A captured graph may ring its schedules as long as it lives. The library can't know how long that is, so these
    schedules are never removed.

    Attributes:
        words: the memory words by which streams, kernels and the proxy wait for one another.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self.words = group.links.proxy.schedule_pointers
        self._dropped: list[tuple[Any, list[int]]] = []  # operations issued by C, and their schedules' numbers

    def stage(self, number: int, least: int) -> Operation:
        """Returns an operation that waits, during a schedule, until the word of a stage is at least `least`."""
        return WaitValue(self.words.stages[number], least)

    def end(self, stages: Collection[int] = (), *, gated: bool = False) -> list[Operation]:
        """Returns operations that wait for the end of the schedule, and then reset the words that the schedule and the
        stream wrote.

        Args:
            stages: numbers of the stages that no kernel resets. For each such stage the stream makes a write, which
                takes time.
            gated: whether the schedule's gate was used.
        """
        words = self.words
        used = [words.done, *(words.stages[stage] for stage in stages), *([words.gate] if gated else [])]
        return [WaitValue(words.done, 1), *(WriteValue(word, 0) for word in used)]

    def prepare(self, steps: Sequence[Step]) -> StreamOperations:
        """Adds the schedules among these operations to the proxy, and returns the operations with the schedules'
        numbers in place of the schedules.

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
        """Removes dropped schedules once there are many, because removal waits for all schedules that were rung."""
        last = self._group.launches.last_stream
        if len(self._dropped) < _MOST_DROPPED or last is None or self._group.runtime.is_capturing(last):
            return
        dropped = self._dropped[:_MOST_DROPPED]
        del self._dropped[:_MOST_DROPPED]  # other threads may add schedules to the list during this call
        event: Event = self._group.runtime.create_event()
        event.record(last)
        event.synchronize()
        for prepared, numbers in dropped:
            for number in () if prepared.captured else numbers:
                self._group.links.proxy.remove_schedule(number)
