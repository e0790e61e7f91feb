"""Checks whether memory still belongs to the same allocation."""

from __future__ import annotations

from proxyccl.device._native import ffi, lib
from proxyccl.device.base_runtime import Allocations, DriverCalls

_LAST_ADDRESS = (1 << 64) - 1


class AllocationGuard:
    """Stores the numbers of allocations, and checks later that they are unchanged (allocation_guard.h).

    Args:
        calls: the runtime's driver calls.
        allocations: the result of `BaseRuntime.allocations`.
    """

    def __init__(self, calls: DriverCalls, allocations: Allocations) -> None:
        self._kept = allocations  # keeps the words alive
        self._allocations = ffi.new("ProxycclAllocation[]", len(allocations))
        for each, allocation in zip(self._allocations, allocations, strict=True):
            each.ptr, each.id, each.word = allocation.ptr, allocation.number, allocation.word or ffi.NULL
        self._guard = ffi.new("ProxycclAllocationGuard *")
        self._guard.pointer_attribute = ffi.cast("void *", calls.pointer_attribute)
        self._guard.attribute = calls.buffer_id
        self._guard.allocations, self._guard.count = self._allocations, len(allocations)

    @property
    def holds(self) -> bool:
        """Whether each address still lies in its allocation. False if the driver can't tell."""
        return bool(lib.proxyccl_allocations_hold(self._guard, 0, _LAST_ADDRESS))

    @property
    def addresses(self) -> tuple[int, int]:
        """The addresses of the C function that checks a range, and of its first argument."""
        function = ffi.addressof(lib, "proxyccl_allocations_hold")
        return int(ffi.cast("uintptr_t", function)), int(ffi.cast("uintptr_t", self._guard))
