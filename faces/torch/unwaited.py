"""Works that torch's C++ may hold after Python has forgotten them, kept alive.

Before torch 2.15 a Work that a program hands to C++, as DDP's `join` does, is held there without its Python half. Once
that is freed, C++ does not find our `wait` and waits forever.
"""

from __future__ import annotations

import threading
from typing import Protocol

_MOST = 64


class Waitable(Protocol):
    """A Work."""

    def keep_in(self, unwaited: Unwaited) -> None:
        """Has `forget` be called when it is waited for."""
        ...


class Unwaited:
    """The latest Works of a group that nobody has waited for. With a Work its tensors stay, so there are few."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: dict[int, Waitable] = {}
        self._waited_for: list[Waitable] = []

    def add(self, work: Waitable) -> None:
        """Keeps a Work until it is waited for, or many have come after it."""
        work.keep_in(self)
        with self._lock:
            for each in self._waited_for:
                self._works.pop(id(each), None)
            self._waited_for.clear()
            self._works[id(work)] = work
            if len(self._works) > _MOST:
                del self._works[next(iter(self._works))]

    def forget(self, work: Waitable) -> None:
        """Drops it only with the next Work: a caller that has waited in C++ may still ask for the result."""
        with self._lock:
            if id(work) in self._works:
                self._waited_for.append(work)
