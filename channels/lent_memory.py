"""Lent memory: memory of other allocators, such as torch's, that calls meet repeatedly is announced to the peers.

Nobody registered it. Its owner may free it at any time; then it is withdrawn (symmetric.py), and the peers unmap it.
Until they have, the driver keeps it occupied. So only a part of the device's memory is lent, and none that is scarce.
"""

from __future__ import annotations

import os
import threading
from typing import TypeVar

from proxyccl.channels._prepared_calls import MOST_KEPT
from proxyccl.channels.symmetric import SymmetricMemory
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.errors import ArgumentError
from proxyccl.device.runtime import Runtime

Value = TypeVar("Value")

_VARIABLE = "PROXYCCL_LEND_BYTES"
_LEAST_BYTES = 1 << 20  # of an array; shorter ones gain little
_SHARE = 16  # of the device's memory, at most
_MOST_RANGES = 64
_REMEMBERED = MOST_KEPT
"""Arrays that were met once, and of those that `is_in_place` knows: a step of a program meets as many before it begins
again.
"""
_SURE, _IN_VAIN = 4, 32  # looks at an array


class LentMemory:
    """The memory that one rank lends to the peers of a group.

    Args:
        runtime: the rank's.
        symmetric: announces it.

    Attributes:
        limit: most bytes that are lent; 0: none. By default ``PROXYCCL_LEND_BYTES``, else a share of the device's.
    """

    def __init__(self, runtime: Runtime, symmetric: SymmetricMemory) -> None:
        self._runtime, self._symmetric = runtime, symmetric
        self.limit = limit_of_environment()
        self._met: dict[tuple[int, int], None] = {}  # addresses and sizes
        self._looks: dict[tuple[int, int], int] = {}  # at the same: how many found it in place; below 0, did not
        self._in_place: tuple[tuple[int, int], ...] = ()  # ranges, from start to end
        self._lock = threading.Lock()  # of these
        symmetric.listen(self._forget)

    def meet(self, view: ArrayView) -> bool:
        """Notes that a new call uses an array. The second time its memory is lent, if that pays and there is room.

        Returns:
            Whether that is decided: until then the next call must come here too.
        """
        if self.limit == 0 or view.nbytes < _LEAST_BYTES or not self._symmetric.offered:
            return True
        if self._symmetric.find(view.ptr, view.nbytes) is not None:
            return True
        met = view.ptr, view.nbytes
        with self._lock:
            if met not in self._met:
                _remember(self._met, met, None)
                return False
            del self._met[met]
        whole = self._runtime.whole_allocation(view.ptr, view.nbytes)
        if whole is not None and self._has_room(whole[1]):
            self._symmetric.announce(*whole, lent=True)
        return True

    def is_in_place(self, ptr: int, nbytes: int) -> bool:
        """Whether calls by proxy receive in an array itself, most likely on all ranks.

        The answer turns to yes some calls late, as other ranks may hear of it later. After many looks that did not find
        an array in place, it stays no. So a repeated call takes no look.
        """
        if any(start <= ptr and ptr + nbytes <= end for start, end in self._in_place):
            return True
        array = ptr, nbytes
        looks = self._looks.get(array, 0)
        if looks == -_IN_VAIN:
            return False
        found = self._symmetric.serving_proxies(ptr, nbytes)
        looks = min(looks, 0) - 1 if found is None else max(looks, 0) + 1
        with self._lock:
            if found is None or looks < _SURE:
                _remember(self._looks, array, looks)
            elif found.users:  # otherwise it was withdrawn meanwhile
                self._looks.pop(array, None)
                self._in_place += ((found.start, found.end),)
        return False

    def _forget(self, start: int, end: int) -> None:
        """Memory was announced or withdrawn."""
        with self._lock:
            self._in_place = tuple(known for known in self._in_place if known[1] <= start or end <= known[0])
            for array in [array for array in self._looks if start <= array[0] < end]:
                del self._looks[array]

    def _has_room(self, nbytes: int) -> bool:
        sizes = self._symmetric.lent_sizes
        free, total = self._runtime.memory_left()
        limit = total // _SHARE if self.limit is None else self.limit
        return len(sizes) < _MOST_RANGES and sum(sizes) + nbytes <= min(limit, free)


def _remember(known: dict[tuple[int, int], Value], array: tuple[int, int], value: Value) -> None:
    if array not in known and len(known) >= _REMEMBERED:
        del known[next(iter(known))]
    known[array] = value


def limit_of_environment() -> int | None:
    """The number of bytes in ``PROXYCCL_LEND_BYTES``; None if it is not set. Raises ArgumentError for anything else."""
    text = os.environ.get(_VARIABLE)
    if not text:
        return None
    if not text.isdecimal():
        raise ArgumentError(_VARIABLE, f"must be a number of bytes, 0 for none, not {text!r}")
    return int(text)
