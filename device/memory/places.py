"""Places: equal parts of one memory, each of which torch's caching allocator uses as an allocation (places.h)."""

from __future__ import annotations

import threading
from typing import ClassVar

from proxyccl.device._native import ffi, lib
from proxyccl.device.base_runtime import BaseRuntime, Memory
from proxyccl.device.errors import ResourceError

ALLOCATE, FREE = "proxyccl_place_allocate", "proxyccl_place_free"
"""The names of the C functions that torch calls, which `memory_pool.library()` exports."""
_MIN_LARGE, _ROUND_LARGE = 10 << 20, 2 << 20


def own_segment_bytes(nbytes: int) -> int:
    """Returns the smallest size, at least `nbytes`, of which torch's caching allocator makes a separate allocation.

    For smaller arrays torch splits larger allocations (c10/cuda/CUDACachingAllocator.cpp, kMinLargeAlloc and
    kRoundLarge).
    """
    return -(-max(nbytes, _MIN_LARGE) // _ROUND_LARGE) * _ROUND_LARGE


class Places:
    """Places in one memory. The memory is kept until torch has freed all places.

    Args:
        runtime: the memory's runtime.
        memory: the memory that contains the places.
        offset: the offset of the first place.
        nbytes: bytes of each place.
        count: the number of places.

    Raises:
        ResourceError: the table of places can't be allocated.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _outlived: ClassVar[list[Places]] = []  # closed objects of which torch still uses places

    def __init__(self, runtime: BaseRuntime, memory: Memory, offset: int, nbytes: int, count: int) -> None:
        self._runtime, self._memory = runtime, memory
        self._start, self._nbytes, self._count = memory.ptr + offset, nbytes, count
        self._native = lib.proxyccl_places_open(self._start, nbytes, count)
        if not self._native:
            raise ResourceError("can't allocate the table of places")
        self._let_go()

    def choose(self) -> None:
        """Makes torch's allocations in this thread return places, until `leave`. If no place is left, torch gets an
        address outside all places, which the caller must free immediately without using it.
        """
        idle = lib.proxyccl_places_idle(self._native)
        if idle:
            self._runtime.synchronize()
            lib.proxyccl_places_renew(self._native, idle)  # places that were freed after `idle` was read stay idle
        lib.proxyccl_places_choose(self._native)

    @staticmethod
    def leave() -> None:
        """Ends `choose`."""
        lib.proxyccl_places_choose(ffi.NULL)

    def number_at(self, ptr: int) -> int | None:
        """Returns the index of the place that begins at an address, or None."""
        number, behind = divmod(ptr - self._start, self._nbytes)
        return number if behind == 0 and 0 <= number < self._count else None

    def close(self) -> None:
        """Frees the memory as soon as torch has freed all places."""
        self._let_go(self)

    @classmethod
    def _let_go(cls, *closed: Places) -> None:
        with cls._lock:
            cls._outlived[:] = [
                places for places in (*cls._outlived, *closed) if not lib.proxyccl_places_close(places._native)
            ]
