"""Places: equal parts of one memory that another library's caching allocator hands out (places.h)."""

from __future__ import annotations

import threading
from typing import ClassVar

from proxyccl.device._native import ffi, lib
from proxyccl.device.base_runtime import BaseRuntime, Memory
from proxyccl.device.errors import ResourceError

ALLOCATE, FREE = "proxyccl_place_allocate", "proxyccl_place_free"
"""The names of the library's functions, which are exported where those of `memory_pool` are."""
_MIN_LARGE, _ROUND_LARGE = 10 << 20, 2 << 20


def own_segment_bytes(nbytes: int) -> int:
    """Returns the least size of at least `nbytes` for which torch's caching allocator makes a separate allocation.

    It cuts smaller arrays out of larger allocations (c10/cuda/CUDACachingAllocator.cpp, kMinLargeAlloc and
    kRoundLarge).
    """
    return -(-max(nbytes, _MIN_LARGE) // _ROUND_LARGE) * _ROUND_LARGE


class Places:
    """Places in one memory. The memory is kept until the library has freed all of them.

    Args:
        runtime: the memory's runtime.
        memory: the memory that contains the places.
        offset: the offset of the first place.
        nbytes: size of each place.
        count: their number.

    Raises:
        ResourceError: the table of places can't be allocated.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _outlived: ClassVar[list[Places]] = []  # closed objects whose places the library still uses

    def __init__(self, runtime: BaseRuntime, memory: Memory, offset: int, nbytes: int, count: int) -> None:
        self._runtime, self._memory = runtime, memory
        self._start, self._nbytes, self._count = memory.ptr + offset, nbytes, count
        self._native = lib.proxyccl_places_open(self._start, nbytes, count)
        if not self._native:
            raise ResourceError("can't allocate the table of places")
        self._let_go()

    def choose(self) -> None:
        """Makes this thread's allocations until `leave` return a place or, if none is left, an address outside all
        places. An allocation outside all places must be freed immediately, unused.
        """
        idle = lib.proxyccl_places_idle(self._native)
        if idle:
            self._runtime.synchronize()
            lib.proxyccl_places_renew(self._native, idle)  # places freed since then are not renewed
        lib.proxyccl_places_choose(self._native)

    @staticmethod
    def leave() -> None:
        """Ends `choose`."""
        lib.proxyccl_places_choose(ffi.NULL)

    def number_at(self, ptr: int) -> int | None:
        """Returns the number, from 0, of the place that begins at an address; None if no place begins there."""
        number, behind = divmod(ptr - self._start, self._nbytes)
        return number if behind == 0 and 0 <= number < self._count else None

    def close(self) -> None:
        """Frees the places, or keeps them until the library has freed all of them."""
        self._let_go(self)

    @classmethod
    def _let_go(cls, *closed: Places) -> None:
        """Drops the closed places of which the library holds none."""
        with cls._lock:
            cls._outlived[:] = [
                places for places in (*cls._outlived, *closed) if not lib.proxyccl_places_close(places._native)
            ]
