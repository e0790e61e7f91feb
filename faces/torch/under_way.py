"""The calls of a process group that were issued and are not known to have ended."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable

_MOST = 1024


class UnderWay:
    """The calls of one group, by flow: those of a flow end in order.

    Args:
        healthy: whether no communicator of the group has failed. A failure ends all waits, so calls that end after it
            stay recorded.
    """

    def __init__(self, healthy: Callable[[], bool]) -> None:
        self._healthy = healthy
        self._lock = threading.Lock()
        self._flows: dict[Hashable, deque[tuple[int, str, Callable[[], bool] | None]]] = {}

    def add(self, flow: Hashable, number: int, name: str, ended: Callable[[], bool] | None) -> None:
        """Adds a call.

        Args:
            flow: the flow that orders it.
            number: rises from call to call.
            name: for messages.
            ended: tells whether it has ended; None if `end`, or a later call of the flow, will tell.
        """
        with self._lock:
            calls = self._flows.setdefault(flow, deque(maxlen=_MOST))
            self._forget_ended(calls)
            calls.append((number, name, ended))

    def end(self, flow: Hashable, number: int) -> None:
        """Forgets the calls of a flow up to a number."""
        with self._lock:
            calls = self._flows[flow]
            while calls and calls[0][0] <= number:
                calls.popleft()

    def oldest(self) -> tuple[int, str] | None:
        """The number and the name of the oldest call; None if there is none."""
        with self._lock:
            for calls in self._flows.values():
                self._forget_ended(calls)
            heads = [calls[0] for calls in self._flows.values() if calls]
        number, name, _ = min(heads, key=lambda call: call[0], default=(0, "", None))
        return (number, name) if heads else None

    def _forget_ended(self, calls: deque[tuple[int, str, Callable[[], bool] | None]]) -> None:
        while True:
            place = next((place for place, (_, _, ended) in enumerate(calls) if ended is not None), None)
            if place is None:
                return
            ended = calls[place][2]
            if ended is None or not ended() or not self._healthy():
                return
            for _ in range(place + 1):
                calls.popleft()
