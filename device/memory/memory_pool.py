"""The segments of memory that another library allocates and frees (memory_pool.h)."""

from __future__ import annotations

import importlib.util

from msgspec import Struct

from proxyccl.device._native import ffi, lib
from proxyccl.device.base_runtime import BaseRuntime
from proxyccl.device.errors import ArgumentError
from proxyccl.device.ffi_types import set_functions
from proxyccl.device.owned import Owned

ALLOCATE, FREE = "proxyccl_pool_allocate", "proxyccl_pool_free"
"""The names of the C functions that the other library calls."""


def library() -> str:
    """Returns the path of the shared object that exports the C functions."""
    found = importlib.util.find_spec("proxyccl.device._native")
    assert found is not None
    assert found.origin is not None  # imported above
    return found.origin


class Segment(Struct, frozen=True):
    """An allocation of the other library."""

    number: int  # the segment's number, which is never reused
    ptr: int  # the segment's address
    nbytes: int  # the segment's size
    freed: bool  # whether the library has freed the segment, whose memory remains until the last hold ends


class SegmentHold(Owned):
    """Keeps a segment's memory allocated until this object is closed or has no references."""


def _release(runtime: BaseRuntime, number: int) -> None:
    ptr = lib.proxyccl_pool_release(runtime.device, number)
    if ptr:
        runtime.free_later(ptr)


class MemoryPool:
    """The segments of a runtime's device.

    Until the first `MemoryPool` of a device, the library's allocations on the device fail. All `MemoryPool` objects of
    a device share its segments.

    Args:
        runtime: the runtime whose driver allocates the segments.

    Raises:
        ArgumentError: the device's number is too large, or another runtime has a pool for this device number.
    """

    def __init__(self, runtime: BaseRuntime) -> None:
        self._runtime, self._device = runtime, runtime.device
        calls = runtime.calls
        native = ffi.new("ProxycclPoolCalls *")
        names = ("allocate", "allocate_with_flags", "free", "current", "make_current", "exchange_capture_mode")
        set_functions(ffi, native, calls, *names)
        native.flags, native.context, native.relaxed = calls.flags, calls.context, calls.relaxed
        if lib.proxyccl_pool_configure(self._device, native):
            raise ArgumentError(
                "runtime", f"device {self._device} can't have a memory pool of {runtime.name}: another runtime has it"
            )

    @property
    def changes(self) -> int:
        """A number that grows when segments are added, freed or removed."""
        return lib.proxyccl_pool_changes(self._device)

    def segments(self) -> list[Segment]:
        """Returns all segments, including freed ones that are still held."""
        room = lib.proxyccl_pool_segments(self._device, ffi.NULL, 0)
        while True:
            found = ffi.new("ProxycclSegment[]", room)
            count = lib.proxyccl_pool_segments(self._device, found, room)
            if count <= room:
                return [Segment(s.number, s.ptr, s.bytes, bool(s.freed)) for s in list(found)[:count]]
            room = count

    def hold(self, number: int) -> SegmentHold | None:
        """Keeps a segment's memory even if the library frees the segment. Returns None if it was already freed."""
        if not lib.proxyccl_pool_hold(self._device, number):
            return None
        return SegmentHold(_release, self._runtime, number)
