"""Memory allocated as torch allocates it: through functions of memory_pool.h that are looked up by name."""

from __future__ import annotations

import ctypes
import mmap

from proxyccl import Array, Runtime
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.memory import memory_pool
from proxyccl.device.memory.memory_pool import MemoryPool
from support.fakes.torch import PluggableAllocator

_TRIES = 32  # of each size
_allocator = PluggableAllocator(memory_pool.library(), memory_pool.ALLOCATE, memory_pool.FREE)


def allocate(nbytes: int, device: int) -> int:
    """Allocates device memory. Returns the memory's address, or 0 if there is not enough memory."""
    return _allocator.allocate(nbytes, device, None) or 0


def free(ptr: int, nbytes: int, device: int) -> None:
    _allocator.free(ptr, nbytes, device, None)


class ForeignMemory:
    """Memory of a runtime's device that its owner may free at any time."""

    def __init__(self, runtime: Runtime, nbytes: int) -> None:
        MemoryPool(runtime)  # makes `allocate` use this device
        self._runtime, self.nbytes, self.closed = runtime, nbytes, False
        self.ptr = allocate(nbytes, runtime.device)
        assert self.ptr

    def close(self) -> None:
        """Frees the memory, unless it is already freed."""
        if not self.closed:
            self.closed = True
            free(self.ptr, self.nbytes, self._runtime.device)

    def array(self, dtype: str = "uint8") -> Array:
        """Returns all of the memory as an array."""
        element = as_dtype(dtype)
        return Array(self._runtime, self, (self.nbytes // element.itemsize,), element)

    def replaced(self) -> ForeignMemory:
        """Returns new memory at the address of this memory, which must already be freed."""
        assert self.closed
        if self._runtime.name == "cuda":
            return self._replaced_by_driver()
        places = _take_places_before(self.ptr, self.nbytes)
        made = ForeignMemory(self._runtime, self.nbytes)
        del places
        assert made.ptr == self.ptr, "the system gives the address to nobody"
        return made

    def _replaced_by_driver(self) -> ForeignMemory:
        # The driver mostly gives out low addresses first, so large allocations fill large gaps below the address.
        elsewhere: list[ForeignMemory] = []
        try:
            for nbytes in (self.nbytes, 1 << 30, 1 << 28, 1 << 26, 1 << 24, self.nbytes):
                for _ in range(_TRIES):
                    made = ForeignMemory(self._runtime, nbytes)
                    if (made.ptr, nbytes) == (self.ptr, self.nbytes):
                        return made
                    elsewhere.append(made)
                    if nbytes > self.nbytes and made.ptr + nbytes > self.ptr:
                        elsewhere.pop().close()
                        break
            raise AssertionError(f"the driver gives the address {self.ptr:#x} to nobody")
        finally:
            for memory in elsewhere:
                memory.close()


def _take_places_before(ptr: int, nbytes: int) -> list[mmap.mmap]:
    """Maps all free ranges that mmap would prefer to `ptr` for a mapping of this size. Returns the mappings."""
    whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    wanted, taken = whole, []
    for _ in range(10_000):
        place = mmap.mmap(-1, wanted)
        at = ctypes.addressof(ctypes.c_char.from_buffer(place))
        if (at, wanted) == (ptr, whole):
            place.close()
            return taken
        if wanted == whole and ptr < at < ptr + whole:  # overlaps the wanted range: map only the bytes above that range
            place.close()
            wanted = at - ptr
            continue
        taken.append(place)
        if at == ptr + whole:
            wanted = whole
    raise AssertionError("the system gives the address to nobody")
