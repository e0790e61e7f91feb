"""Works that torch's C++ may hold after Python has forgotten them, kept alive.

Before torch 2.15 a Work that a program hands to C++, as DDP's `join` does, is held there without its Python half. Once
that is freed, C++ does not find our `wait` and waits forever.
"""

from __future__ import annotations

from typing import Protocol

_MOST = 64


class Waitable(Protocol):
    """A Work.

    Attributes:
        _unwaited: its `forget` is called when the Work is waited for.
    """

    _unwaited: Unwaited | None


class Unwaited:
    """The latest Works of a group that nobody has waited for. With a Work its tensors stay, so there are few.

    Without a lock: each step is one operation of a dict or a list, which no other thread interrupts.
    """

    def __init__(self) -> None:
        self._works: dict[int, Waitable] = {}
        self._waited_for: list[Waitable] = []

    def add(self, work: Waitable) -> None:
        """Keeps a Work until it is waited for, or many have come after it."""
        work._unwaited = self
        works = self._works
        if self._waited_for:
            self._drop_waited_for()
        works[id(work)] = work
        if len(works) > _MOST:
            works.pop(next(iter(list(works))), None)

    def _drop_waited_for(self) -> None:
        waited_for = self._waited_for
        while waited_for:
            try:
                each = waited_for.pop()
            except IndexError:  # another thread took it
                break
            self._works.pop(id(each), None)

    def forget(self, work: Waitable) -> None:
        """Drops it only with the next Work: a caller that has waited in C++ may still ask for the result."""
        if id(work) in self._works:
            self._waited_for.append(work)
