"""Frees memory and modules of a device that nothing refers to, when a call next waits for the device.

A wait for the device does not include kernels of other devices and processes, which may access the device's memory.
While a `Hold` returns True, such kernels may run, and this process frees no allocation.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import ClassVar

from proxyccl.device.process.left_behind import take_each

Free = Callable[[], None]
Hold = Callable[[], bool]
"""Returns whether kernels that this process can't wait for may now access its memory. Any thread may call a hold."""

_lock = threading.RLock()  # reentrant: garbage collection may free memory anywhere
_holds: list[Hold] = []


def add_hold(hold: Hold) -> None:
    """Registers a hold, which `UnusedMemory.free` queries until `remove_hold`."""
    with _lock:
        _holds.append(hold)


def remove_hold(hold: Hold) -> None:
    """Removes a hold that `add_hold` registered. A second call does nothing."""
    with _lock, contextlib.suppress(ValueError):
        _holds.remove(hold)


def is_held() -> bool:
    """Whether any hold is active. Queries each hold."""
    with _lock:
        holds = list(_holds)
    held = False
    for hold in holds:
        held |= hold()
    return held


class UnusedMemory:
    """One device's queue of calls that free memory without references."""

    _on: ClassVar[dict[tuple[str, int], UnusedMemory]] = {}
    _kept: ClassVar[list[tuple[int, Free]]] = []

    def __init__(self) -> None:
        self._others: deque[Free] = deque()
        self._pins: deque[tuple[int, int, Free]] = deque()  # address, size, and the call that unpins
        self._allocations: deque[tuple[int, Free]] = deque()  # address, and the call that frees

    @classmethod
    def on(cls, runtime: str, device: int) -> UnusedMemory:
        """Returns the process's object for a device."""
        return cls._on.setdefault((runtime, device), cls())

    @classmethod
    def keep_all(cls) -> int:
        """Makes sure that the allocations that are queued now, on all devices, are never freed. Returns their
        number."""
        kept = [each for unused in list(cls._on.values()) for each in take_each(unused._allocations)]
        cls._kept += kept
        return len(kept)

    def __bool__(self) -> bool:
        return bool(self._others or self._pins or self._allocations)

    def append(self, free: Free) -> None:
        """Queues a call that frees a mapping, a module or another resource that only this device's kernels use."""
        self._others.append(free)

    def append_pin(self, ptr: int, nbytes: int, free: Free) -> None:
        """Queues a call that unpins a range of host memory. The range's owner may already have freed the memory."""
        self._pins.append((ptr, nbytes, free))

    @classmethod
    def unpin(cls, ptr: int, nbytes: int) -> None:
        """Unpins queued ranges, of all devices, that overlap a range, which may be new memory at the addresses of freed
        memory.
        """
        for unused in list(cls._on.values()):
            for pin in list(unused._pins):
                first, size, free = pin
                if first < ptr + nbytes and ptr < first + size:
                    try:
                        unused._pins.remove(pin)
                    except ValueError:  # another thread has unpinned it
                        continue
                    free()

    def append_allocation(self, ptr: int, free: Free) -> None:
        """Queues a call that frees this process's allocation at address `ptr`."""
        self._allocations.append((ptr, free))

    def has_allocation(self, ptr: int) -> bool:
        """Whether the allocation at an address is queued for freeing, or is one that `keep_all` keeps."""
        return any(ptr == unused for unused, _ in (*self._allocations, *self._kept))

    def free(self) -> None:
        """Makes the queued calls. While a hold is active, allocations are not freed. The caller must have waited for
        the device."""
        for free in take_each(self._others):
            free()
        for *_, free in take_each(self._pins):
            free()
        taken = deque(take_each(self._allocations))
        try:
            # Queries holds last, because a communicator that fails releases its hold only after its failure.
            if taken and not is_held():
                for _, free in take_each(taken):
                    free()
        finally:  # puts back the calls that were not made
            self._allocations.extend(taken)
