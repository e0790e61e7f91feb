"""Lends memory: announces to the peers an unregistered array, such as a torch tensor, that calls use often.

The memory's owner may free it at any time; then `SymmetricMemory` withdraws the announcement, and the peers unmap the
memory. Because freed memory is not available until all peers have unmapped it, only a part of the device's memory is
lent, and nothing is lent while memory is scarce.

If peers can't access an array, a call only notes the array's address. The watcher's thread counts these notes, and
announces and withdraws memory, which the peers' watchers map and unmap. Memory is exported only inside a call, which
keeps the array alive; at other times the owner may unmap the memory at any moment.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque

from proxyccl.channels.calls._calls import Calls
from proxyccl.channels.symmetric import Export, SymmetricMemory
from proxyccl.device.errors import ArgumentError
from proxyccl.device.process.left_behind import take_each
from proxyccl.device.runtime import Runtime

_VARIABLE = "PROXYCCL_LEND_BYTES"
_SHARE = 16  # lent memory is at most 1/16 of the device's memory
_MOST_RANGES = 64
_WINDOW_SECONDS = 1.0
_OFTEN, _MOST_OFTEN = 16, 256
"""The number of uses within a window after which an array is lent, and the maximum of that number. The number doubles
each time that the array can't be lent, or that lent memory at its address is freed.
"""
_MOST_DOUBLED = 1024

Met = tuple[int, int]
"""Address and size of an array."""


class LentMemory:
    """The memory that one rank lends to the peers of a group.

    Attributes:
        limit: the greatest number of bytes to lend; None for a share of the device's memory. The default is
            ``PROXYCCL_LEND_BYTES``.
    """

    def __init__(self, runtime: Runtime, symmetric: SymmetricMemory, calls: Calls) -> None:
        self._runtime, self._symmetric, self._calls = runtime, symmetric, calls
        self.limit = limit_of_environment()
        self._met: Counter[Met] = Counter()  # number of uses in this time window
        self._window_ends = 0.0
        self._often: dict[int, int] = {}  # by address, the required number of uses if it differs from _OFTEN
        self._exported: deque[Export] = deque()
        self._refused: deque[int] = deque()  # addresses of arrays that can't be lent now

    @property
    def is_possible(self) -> bool:
        return self.limit != 0 and self._symmetric.offered

    def update(self) -> None:
        """Announces exported memory; and for each array that was noted often, makes the next call on the array export
        its memory. The watcher's thread calls this.
        """
        for exported in take_each(self._exported):
            self._symmetric.lend(exported)
        for start in (*take_each(self._symmetric.freed), *take_each(self._refused)):
            if len(self._often) >= _MOST_DOUBLED:
                self._often.clear()
            self._often[start] = min(2 * self._often.get(start, _OFTEN), _MOST_OFTEN)
        notes = self._calls.take_notes()
        now = time.monotonic()
        if now > self._window_ends:
            self._met.clear()
            self._window_ends = now + _WINDOW_SECONDS
        self._met.update(notes)
        for met in dict.fromkeys(notes):
            if self._calls.reach_of(*met):
                del self._met[met]  # the array was announced after it was noted
            elif self._met[met] >= self._often.get(met[0], _OFTEN):
                del self._met[met]
                self._calls.want(*met, self._export)

    def close(self) -> None:
        """Drops exported memory that was not announced. The watcher must have stopped."""
        for exported in take_each(self._exported):
            self._runtime.end_export(exported.handle)

    def _export(self, ptr: int, nbytes: int) -> None:
        """Exports an array's allocation if the limit allows it. The caller keeps the array alive."""
        whole = self._runtime.whole_allocation(ptr, nbytes)
        exported = self._symmetric.export(*whole) if whole is not None and self._has_room(whole[1]) else None
        if exported is None:
            self._refused.append(ptr)
        else:
            self._exported.append(exported)

    def _has_room(self, nbytes: int) -> bool:
        sizes = [*self._symmetric.lent_sizes, *(exported.nbytes for exported in list(self._exported))]
        free, total = self._runtime.memory_left()
        limit = total // _SHARE if self.limit is None else self.limit
        return len(sizes) < _MOST_RANGES and sum(sizes) + nbytes <= min(limit, free)


def limit_of_environment() -> int | None:
    """Returns the number of bytes in ``PROXYCCL_LEND_BYTES``; None if the variable is not set. Raises ArgumentError for
    any other text.
    """
    text = os.environ.get(_VARIABLE)
    if not text:
        return None
    if not text.isdecimal():
        raise ArgumentError(_VARIABLE, f"must be a number of bytes, 0 to lend nothing, not {text!r}")
    return int(text)
