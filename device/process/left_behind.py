"""Takes the work that finalizers have queued.

A finalizer only appends to a deque, because garbage collection may run in a thread that holds any lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def take_each(left: deque[T]) -> Iterator[T]:
    """Removes and yields the items until none is left. Several threads may take items concurrently."""
    while left:
        try:
            item = left.popleft()
        except IndexError:  # another thread has taken the last item
            return
        yield item
