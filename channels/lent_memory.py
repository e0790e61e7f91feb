"""Lent memory: memory of other allocators, such as torch's, that calls meet repeatedly is announced to the peers.

Nobody registered it. Its owner may free it at any time; then it is withdrawn (symmetric.py), and the peers unmap it.
Until they have, the driver keeps it occupied. So only a part of the device's memory is lent, and none that is scarce.
"""

from __future__ import annotations

import os
import threading

from proxyccl.channels.symmetric import SymmetricMemory
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.errors import ArgumentError
from proxyccl.device.runtime import Runtime

_VARIABLE = "PROXYCCL_LEND_BYTES"
_LEAST_BYTES = 1 << 20  # of an array; shorter ones gain little
_SHARE = 16  # of the device's memory, at most
_MOST_RANGES = 64
_REMEMBERED = 256  # arrays that were met once


class LentMemory:
    """What one rank lends to the peers of a group.

    Args:
        runtime: the rank's.
        symmetric: announces it.

    Attributes:
        limit: most bytes that are lent; 0: none. By default ``PROXYCCL_LEND_BYTES``, else a share of the device's.

    Raises:
        ArgumentError: ``PROXYCCL_LEND_BYTES`` is not a number of bytes.
    """

    def __init__(self, runtime: Runtime, symmetric: SymmetricMemory) -> None:
        self._runtime, self._symmetric = runtime, symmetric
        self.limit = _limit_of_environment()
        self._met: dict[tuple[int, int], None] = {}  # addresses and sizes
        self._lock = threading.Lock()  # of those

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
                if len(self._met) >= _REMEMBERED:
                    del self._met[next(iter(self._met))]
                self._met[met] = None
                return False
            del self._met[met]
        whole = self._runtime.whole_allocation(view.ptr, view.nbytes)
        if whole is not None and self._has_room(whole[1]):
            self._symmetric.announce(*whole, lent=True)
        return True

    def _has_room(self, nbytes: int) -> bool:
        sizes = self._symmetric.lent_sizes
        free, total = self._runtime.memory_left()
        limit = total // _SHARE if self.limit is None else self.limit
        return len(sizes) < _MOST_RANGES and sum(sizes) + nbytes <= min(limit, free)


def _limit_of_environment() -> int | None:
    text = os.environ.get(_VARIABLE)
    if not text:
        return None
    if not text.isdecimal():
        raise ArgumentError(_VARIABLE, f"must be a number of bytes, 0 for none, not {text!r}")
    return int(text)
