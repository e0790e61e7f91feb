"""Memory that another library allocates and frees through C functions, as segments that this process may share."""

from __future__ import annotations

import importlib.util

from msgspec import Struct

from proxyccl.device._native import ffi, lib
from proxyccl.device.base_runtime import BaseRuntime
from proxyccl.device.errors import ArgumentError
from proxyccl.device.ffi_types import set_functions
from proxyccl.device.owned import Owned

ALLOCATE, FREE = "proxyccl_pool_allocate", "proxyccl_pool_free"
"""The names of the functions; memory_pool.h has their signatures."""


def library() -> str:
    """Returns the path of the library that exports the functions."""
    found = importlib.util.find_spec("proxyccl.device._native")
    assert found is not None
    assert found.origin is not None  # the module is found, because it was imported above
    return found.origin


class Segment(Struct, frozen=True):
    """An allocation of the library.

    Attributes:
        number: unique to this segment.
        ptr: its address.
        nbytes: its size.
        freed: whether the library has freed it; its memory then exists until the last hold ends.
    """

    number: int
    ptr: int
    nbytes: int
    freed: bool


class SegmentHold(Owned):
    """Keeps a segment's memory until it is closed, or has no more references. If the library has freed the segment, and
    this was the last hold, the memory is freed then.
    """


def _release(runtime: BaseRuntime, number: int) -> None:
    ptr = lib.proxyccl_pool_release(runtime.device, number)
    if ptr:
        runtime.free_later(ptr)


class MemoryPool:
    """The segments of a runtime's device. The library's allocations on the device fail until a pool was made for it.

    All `MemoryPool` objects of a device stand for the same pool.

    Args:
        runtime: the source of the segments' memory.

    Raises:
        ArgumentError: the device's number is too large, or another runtime has a pool on the device of this number.
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
        """The number of times that segments were added, freed or removed."""
        return lib.proxyccl_pool_changes(self._device)

    def segments(self) -> list[Segment]:
        """Returns the present segments."""
        room = lib.proxyccl_pool_segments(self._device, ffi.NULL, 0)
        while True:
            found = ffi.new("ProxycclSegment[]", room)
            count = lib.proxyccl_pool_segments(self._device, found, room)
            if count <= room:
                return [Segment(s.number, s.ptr, s.bytes, bool(s.freed)) for s in list(found)[:count]]
            room = count

    def hold(self, number: int) -> SegmentHold | None:
        """Keeps a segment's memory even if the library frees it. Returns None if the library has freed it already."""
        if not lib.proxyccl_pool_hold(self._device, number):
            return None
        return SegmentHold(_release, self._runtime, number)
