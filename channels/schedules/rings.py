"""Makes the stream operations that start schedules, and adds schedules to the proxy and removes them."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from typing import Any

from proxyccl.channels.group import Group
from proxyccl.device.runtime import Event
from proxyccl.device.stream_operations import Operation, StreamOperations, WaitValue, WriteValue
from proxyccl.proxy.schedule import Schedule

Step = Operation | Schedule
"""A step of a stream: a `Schedule`, which the stream starts through the proxy's bell, or another `Operation`."""

_MOST_DROPPED = 1024


class ScheduleRings:
    """Adds schedules to the proxy, and removes schedules that no stream can start any longer.

    Captured schedules are never removed, because the library does not know the lifetime of the graph.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        # The addresses of the words by which streams, kernels and the proxy wait for one another.
        self.words = group.links.proxy.schedule_pointers
        self._dropped: list[tuple[Any, list[int]]] = []  # the prepared operations, and the numbers of their schedules

    def stage(self, number: int, least: int) -> Operation:
        """Returns a stream operation that waits until the word of a stage is at least `least`."""
        return WaitValue(self.words.stages[number], least)

    def end(self, stages: Collection[int] = (), *, gated: bool = False) -> list[Operation]:
        """Returns stream operations that wait for the end of the schedule, and then reset the words that were used.

        Args:
            stages: the numbers of the stages to reset, each by one write of the stream; a kernel may reset other
                stages.
            gated: whether the schedule's gate was used.
        """
        words = self.words
        used = [words.done, *(words.stages[stage] for stage in stages), *([words.gate] if gated else [])]
        return [WaitValue(words.done, 1), *(WriteValue(word, 0) for word in used)]

    def prepare(self, steps: Sequence[Step]) -> StreamOperations:
        """Adds the steps that are schedules to the proxy. Returns the stream operations, with a write to the proxy's
        bell in place of each schedule. Raises ResourceError if no numbers are left, and ProxyLostError if the daemon
        that runs the proxy is lost.
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
        """Removes dropped schedules once there are many, because the removal waits for all started schedules."""
        last = self._group.launches.last_stream
        if len(self._dropped) < _MOST_DROPPED or last is None or self._group.runtime.capture_of(last):
            return
        dropped = self._dropped[:_MOST_DROPPED]
        del self._dropped[:_MOST_DROPPED]  # other threads may append to the list during this call
        event: Event = self._group.runtime.create_event()
        event.record(last)
        event.synchronize()
        for prepared, numbers in dropped:
            for number in () if prepared.captured else numbers:
                self._group.links.proxy.remove_schedule(number)
