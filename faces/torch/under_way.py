"""Records a process group's calls in progress and latest ended calls."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable
from typing import NamedTuple

from proxyccl.device.errors import DriverError
from proxyccl.torch._device_calls import ADDED_BETWEEN

_MOST = 1 << 14
"""The largest number of calls in progress that a flow records. A device can't queue more calls. After a failure no call
is recorded as ended, so further calls displace the oldest ones.
"""
_ENDED = 2048
"""The number of ended calls, the latest ones, that are kept for each flow."""

_Call = tuple[int, str, Callable[[], bool] | None]


class Recorded(NamedTuple):
    """The latest calls of a flow. All ranks of the flow normally begin with the same call."""

    first: int  # the first call's number, counted from 1
    names: list[str]
    ended: int  # how many of the named calls have ended


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
        """Counts the calls that have ended, by a binary search of the calls with a mark, because calls end in order."""
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
        before = self.ended_count - len(self.ended)
        skipped = -before % (_ENDED // 2)
        names = [*self.ended, *(name for _, name, _ in list(self.calls))]
        return Recorded(before + skipped + 1, names[skipped:], len(self.ended) + self.count_ended() - skipped)


class UnderWay:
    """A group's calls in progress and latest ended calls, by flow. The calls of a flow end in order. `healthy` returns
    whether no communicator of the group has failed. Calls that end after a failure stay recorded as in progress,
    because the failure may have ended their waits.
    """

    def __init__(self, healthy: Callable[[], bool]) -> None:
        self._healthy = healthy
        self._lock = threading.Lock()
        self._flows: dict[Hashable, _Flow] = {}

    def add(self, flow: Hashable, number: int, name: str, ended: Callable[[], bool] | None) -> None:
        """Adds a call, whose number must exceed the numbers of earlier calls. `ended` returns whether the call has
        ended. If the call can't be queried, `ended` is None, and the call has ended once `end` is called with its
        number, or once a later call of the flow has ended.
        """
        calls = self._flow(flow).calls
        calls.append((number, name, ended))
        if ended is not None and not len(calls) % ADDED_BETWEEN:
            self.forget_ended(flow)

    def log(self, flow: Hashable) -> Callable[[_Call], None]:
        """Returns a function that adds a call (number, name, ended) to a flow, without `forget_ended`."""
        return self._flow(flow).calls.append

    def forget_ended(self, flow: Hashable) -> None:
        """Forgets a flow's ended calls. `add` calls this once in ADDED_BETWEEN calls, because it queries the device."""
        with self._lock:
            self._forget_ended(self._flows[flow])

    def _flow(self, flow: Hashable) -> _Flow:
        found = self._flows.get(flow)
        if found is None:
            with self._lock:
                found = self._flows.setdefault(flow, _Flow())
        return found

    def end(self, flow: Hashable, number: int) -> None:
        """Records that a call has ended, and forgets this call and the flow's earlier calls."""
        with self._lock:
            found = self._flows[flow]
            while found.calls and found.calls[0][0] <= number:
                found.forget(1)

    def oldest(self) -> tuple[int, str] | None:
        """Returns the number and the name of the oldest call in progress; None if no call is in progress."""
        with self._lock:
            for flow in self._flows.values():
                self._forget_ended(flow)
            heads = [flow.calls[0] for flow in self._flows.values() if flow.calls]
        number, name, _ = min(heads, key=lambda call: call[0], default=(0, "", None))
        return (number, name) if heads else None

    def recorded(self) -> dict[Hashable, Recorded]:
        """Returns, for each flow, the calls in progress and the latest calls that have ended.

        Ranks notice the end of a call at different times. So that ranks nearly always report the same calls, the first
        reported call follows a call whose number is a multiple of 1024. After a failure, a call is reported as ended if
        the call's stream has passed it; so the report shows which calls the device had begun.
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
