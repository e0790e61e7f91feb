"""Frees memory and modules without references, when a call next waits for their device.

A wait for a device covers the device's kernels, but not other devices' and processes' kernels that access its memory.
While a `Hold` says that such kernels may run, no allocation is freed in this process.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import ClassVar, Protocol

from proxyccl.device.process.left_behind import take_each

Free = Callable[[], None]


class Hold(Protocol):
    """A condition that may keep this process's allocations from being freed."""

    def holds(self) -> bool:
        """Whether kernels that this process can't wait for may use its memory now. Any thread may call this method."""


_lock = threading.RLock()  # reentrant: garbage collection may free memory anywhere
_holds: list[Hold] = []


def add_hold(hold: Hold) -> None:
    """Registers a hold, which is queried before memory is freed, until `remove_hold`."""
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
        held |= hold.holds()
    return held


class UnusedMemory:
    """The pending calls that free one device's unreferenced memory. A device has one such object."""

    _on: ClassVar[dict[tuple[str, int], UnusedMemory]] = {}
    _kept: ClassVar[list[tuple[int, Free]]] = []

    def __init__(self) -> None:
        self._others: deque[Free] = deque()
        self._pins: deque[tuple[int, int, Free]] = deque()  # pins to end, with the ranges' addresses and sizes
        self._allocations: deque[tuple[int, Free]] = deque()  # allocations to free, with their addresses

    @classmethod
    def on(cls, runtime: str, device: int) -> UnusedMemory:
        """Returns the object for a device. The object outlives runtime objects, because their memory may remain."""
        return cls._on.setdefault((runtime, device), cls())

    @classmethod
    def keep_all(cls) -> int:
        """Keeps the allocations that are pending now, on all devices, and never frees them. Returns the number of these
        allocations."""
        kept = [each for unused in list(cls._on.values()) for each in take_each(unused._allocations)]
        cls._kept += kept
        return len(kept)

    def __bool__(self) -> bool:
        return bool(self._others or self._pins or self._allocations)

    def append(self, free: Free) -> None:
        """Adds the call that frees a resource that no other device's kernels use, such as a mapping or a module."""
        self._others.append(free)

    def append_pin(self, ptr: int, nbytes: int, free: Free) -> None:
        """Adds the call that unpins a range of the host's memory, which its owner may have freed."""
        self._pins.append((ptr, nbytes, free))

    @classmethod
    def unpin(cls, ptr: int, nbytes: int) -> None:
        """Ends the pins, on all devices, that overlap a range, because the range may be new memory at the addresses
        of the pinned memory.
        """
        for unused in list(cls._on.values()):
            for pin in list(unused._pins):
                first, size, free = pin
                if first < ptr + nbytes and ptr < first + size:
                    try:
                        unused._pins.remove(pin)
                    except ValueError:  # another thread has taken the call
                        continue
                    free()

    def append_allocation(self, ptr: int, free: Free) -> None:
        """Adds the call that frees an allocation of this process, with its address."""
        self._allocations.append((ptr, free))

    def has_allocation(self, ptr: int) -> bool:
        """Whether the allocation at an address is to be freed by this object, or will never be freed."""
        return any(ptr == unused for unused, _ in (*self._allocations, *self._kept))

    def free(self) -> None:
        """Makes the pending calls, except those that free allocations if a hold is active. The caller must have waited
        for the device."""
        for free in take_each(self._others):
            free()
        for *_, free in take_each(self._pins):
            free()
        taken = deque(take_each(self._allocations))
        try:
            # Holds are queried after the other calls, because a failed communicator releases its hold only after its
            # failure.
            if taken and not is_held():
                for _, free in take_each(taken):
                    free()
        finally:  # puts back the calls that are held, or that follow a call that raised
            self._allocations.extend(taken)
