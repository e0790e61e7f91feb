"""Work that finalizers leave to later calls.

Garbage collection may run while its thread holds any lock. So a finalizer only appends to a deque.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def take_each(left: deque[T]) -> Iterator[T]:
    """Removes and yields the items, one after another, until none is left. Several threads may do this concurrently."""
    while left:
        try:
            item = left.popleft()
        except IndexError:  # another thread has taken the last item
            return
        yield item
