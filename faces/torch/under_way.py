"""Records the calls of a process group that were issued and are not known to have ended."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from proxyccl.device.errors import DriverError
from proxyccl.torch._device_calls import ADDED_BETWEEN

_MOST = 1 << 14
"""The most calls in progress that a flow records, more than a device queues. After a failure no call counts as ended,
and the oldest calls are dropped.
"""
_ENDED = 2048
"""The latest calls of a flow that have ended, whose names are kept."""

_Call = tuple[int, str, Callable[[], bool] | None]


class Recorded(NamedTuple):
    """The calls of a flow, from a number that all its ranks report alike."""

    first: int  # the first call's number, counted from 1
    names: list[str]
    ended: int  # how many of the calls have ended


class _Flow:
    def __init__(self) -> None:
        self.calls: deque[_Call] = deque(maxlen=_MOST)  # calls that are not known to have ended
        self.ended: deque[str] = deque(maxlen=_ENDED)  # names of the latest calls that have ended
        self.ended_count = 0  # how many calls have ended

    def forget(self, count: int) -> None:
        take = self.calls.popleft
        self.ended.extend([take()[1] for _ in range(count)])
        self.ended_count += count

    def count_ended(self) -> int:
        """How many of the oldest calls have ended. A binary search over the calls that can be queried finds the last
        one that has ended; the calls before it have ended too.
        """
        calls = list(self.calls)
        known = [place for place, call in enumerate(calls) if call[2] is not None]
        first, end = 0, len(known)  # the first call that has not ended is in this range
        while first < end:
            middle = (first + end) // 2
            if _has_ended(calls[known[middle]]):
                first = middle + 1
            else:
                end = middle
        return known[first - 1] + 1 if first else 0

    def recorded(self) -> Recorded:
        """The calls, from a number that all ranks of the flow report alike."""
        before = self.ended_count - len(self.ended)
        skipped = -before % (_ENDED // 2)
        names = [*self.ended, *(name for _, name, _ in list(self.calls))]
        return Recorded(before + skipped + 1, names[skipped:], len(self.ended) + self.count_ended() - skipped)


class UnderWay:
    """The calls of one group, by flow. Calls of a flow end in order.

    Args:
        healthy: whether no communicator of the group has failed. A failure ends all waits, so calls that end after it
            stay recorded.
    """

    def __init__(self, healthy: Callable[[], bool]) -> None:
        self._healthy = healthy
        self._lock = threading.Lock()
        self._flows: dict[Hashable, _Flow] = {}

    def add(self, flow: Hashable, number: int, name: str, ended: Callable[[], bool] | None) -> None:
        """Adds a call, whose number must exceed the numbers of earlier calls. Rarely takes a lock, because appending
        to a deque is atomic. `ended` returns whether the call has ended; None if `end`, or a later call of the flow,
        will show it.
        """
        calls = self._flow(flow).calls
        calls.append((number, name, ended))
        if ended is not None and not len(calls) % ADDED_BETWEEN:
            self.forget_ended(flow)

    def log(self, flow: Hashable) -> Callable[[_Call], None]:
        """A function that adds a call, given as (number, name, ended), to a flow. Unlike `add`, it forgets no calls."""
        return self._flow(flow).calls.append

    def forget_ended(self, flow: Hashable) -> None:
        """Forgets the calls of a flow that have ended. Forgetting queries the device, so `forget_ended` is called only
        once in several calls.
        """
        with self._lock:
            self._forget_ended(self._flows[flow])

    def _flow(self, flow: Hashable) -> _Flow:
        found = self._flows.get(flow)
        if found is None:
            with self._lock:
                found = self._flows.setdefault(flow, _Flow())
        return found

    def end(self, flow: Hashable, number: int) -> None:
        """Forgets the calls of a flow up to a number, which have ended."""
        with self._lock:
            found = self._flows[flow]
            while found.calls and found.calls[0][0] <= number:
                found.forget(1)

    def oldest(self) -> tuple[int, str] | None:
        """The number and the name of the oldest call; None if there is none."""
        with self._lock:
            for flow in self._flows.values():
                self._forget_ended(flow)
            heads = [flow.calls[0] for flow in self._flows.values() if flow.calls]
        number, name, _ = min(heads, key=lambda call: call[0], default=(0, "", None))
        return (number, name) if heads else None

    def recorded(self) -> dict[Hashable, Recorded]:
        """The calls by flow: calls in progress and the latest calls that have ended.

        The ranks of a flow notice the end of a call at different times. The first reported call follows a multiple of
        1024, so that ranks nearly always report the same calls. After a failure a call counts as ended if its stream
        has passed it, because that shows which calls the device had begun.
        """
        with self._lock:
            return {key: flow.recorded() for key, flow in self._flows.items()}

    def _forget_ended(self, flow: _Flow) -> None:
        count = flow.count_ended()
        if count and self._healthy():
            flow.forget(count)


def _has_ended(call: _Call) -> bool:
    ended = call[2]
    try:
        return ended is not None and ended()
    except DriverError:  # once the device's context is lost, events can't be queried
        return False
