"""The calls of a process group that were issued and are not known to have ended."""

from __future__ import annotations

import functools
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Hashable

from proxyccl.device.errors import DriverError
from proxyccl.torch._device_calls import ADDED_BETWEEN

_MOST = 1024

_Call = tuple[int, str, Callable[[], bool] | None]


class UnderWay:
    """The calls of one group, by flow: those of a flow end in order.

    Args:
        healthy: whether no communicator of the group has failed. A failure ends all waits, so calls that end after it
            stay recorded.
    """

    def __init__(self, healthy: Callable[[], bool]) -> None:
        self._healthy = healthy
        self._lock = threading.Lock()
        self._flows: dict[Hashable, deque[_Call]] = {}
        self._tells: defaultdict[Hashable, itertools.count[int]] = defaultdict(functools.partial(itertools.count, 1))

    def add(self, flow: Hashable, number: int, name: str, ended: Callable[[], bool] | None) -> None:
        """Adds a call. Nearly always without a lock: a deque is appended to by one operation.

        Args:
            flow: the flow that orders it.
            number: rises from call to call.
            name: for messages.
            ended: tells whether it has ended; None if `end`, or a later call of the flow, will tell.
        """
        self._calls_of(flow).append((number, name, ended))
        if ended is not None and not next(self._tells[flow]) % ADDED_BETWEEN:
            self.forget_ended(flow)

    def log(self, flow: Hashable) -> Callable[[_Call], None]:
        """A function that adds a call to a flow, given as (number, name, ended), as `add` does; but it forgets none."""
        return self._calls_of(flow).append

    def forget_ended(self, flow: Hashable) -> None:
        """Forgets the calls of a flow that have ended. Called once in several calls, as it asks the device."""
        with self._lock:
            self._forget_ended(self._flows[flow])

    def _calls_of(self, flow: Hashable) -> deque[_Call]:
        calls = self._flows.get(flow)
        if calls is None:
            with self._lock:
                calls = self._flows.setdefault(flow, deque(maxlen=_MOST))
        return calls

    def end(self, flow: Hashable, number: int) -> None:
        """Forgets the calls of a flow up to a number."""
        with self._lock:
            _forget(self._flows[flow], number)

    def oldest(self) -> tuple[int, str] | None:
        """The number and the name of the oldest call; None if there is none."""
        with self._lock:
            for calls in self._flows.values():
                self._forget_ended(calls)
            heads = [calls[0] for calls in self._flows.values() if calls]
        number, name, _ = min(heads, key=lambda call: call[0], default=(0, "", None))
        return (number, name) if heads else None

    def _forget_ended(self, calls: deque[_Call]) -> None:
        """Finds the last call that has ended by halves: those before it have ended too."""
        known = [call for call in list(calls) if call[2] is not None]
        first, end = 0, len(known)  # the first that has not ended is within
        while first < end:
            middle = (first + end) // 2
            if _has_ended(known[middle]):
                first = middle + 1
            else:
                end = middle
        if first and self._healthy():
            _forget(calls, known[first - 1][0])


def _has_ended(call: _Call) -> bool:
    ended = call[2]
    try:
        return ended is not None and ended()
    except DriverError:  # it can't be known once the device's context is lost
        return False


def _forget(calls: deque[_Call], number: int) -> None:
    while calls and calls[0][0] <= number:
        calls.popleft()
