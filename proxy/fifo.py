"""A ring's memory: slots and tail in pinned host memory, the producers' words in device memory."""

from __future__ import annotations

from typing import Any

from proxyccl.device._native import ffi
from proxyccl.device.errors import ArgumentError
from proxyccl.device.runtime import PinnedMemory, Runtime

_SLOT_BYTES = 16
_LINE = 128  # no two of the words that different parties write share a cache line


class Ring:
    """What the proxy's worker reaches of a ring: slots and tail. It may be another process's.

    Args:
        memory: of `ring_bytes(size)` at least, zeroed.
        size: slots, a power of two from 2 to 2**20.
    """

    def __init__(self, memory: PinnedMemory, size: int) -> None:
        require_ring_size(size)
        self.size = size
        self.size_log2 = size.bit_length() - 1
        self.pinned = memory
        self.slots_host = memory.host_ptr
        self.tail_host = memory.host_ptr + size * _SLOT_BYTES

    def close(self) -> None:
        """Frees the memory. Neither a kernel nor the proxy may use the ring any more."""
        self.pinned.close()


def require_ring_size(size: int) -> None:
    """Raises ArgumentError for a number of slots that no ring has."""
    if not isinstance(size, int) or size < 2 or size > 1 << 20 or size & (size - 1):
        raise ArgumentError("fifo_size", f"must be a power of two from 2 to {1 << 20}, not {size!r}")


def ring_bytes(size: int) -> int:
    """The pinned memory that a ring takes."""
    return size * _SLOT_BYTES + _LINE


class Fifo(Ring):
    """A ring of triggers that kernels push to and one proxy worker drains.

    Args:
        runtime: whose kernels push.
        size: slots, a power of two from 2 to 2**20. It may be smaller than the number of producers.
    """

    def __init__(self, runtime: Runtime, size: int = 8192) -> None:
        require_ring_size(size)
        super().__init__(runtime.allocate_pinned(ring_bytes(size)), size)
        self._device = runtime.allocate(3 * _LINE)

    def fill_handle(self, handle: Any) -> None:
        """Fills a ProxycclFifo with the device's addresses."""
        slots = self.pinned.ptr
        handle.slots = ffi.cast("ProxycclTrigger *", slots)
        handle.tail = ffi.cast("uint64_t *", slots + self.size * _SLOT_BYTES)
        handle.head = ffi.cast("uint64_t *", self._device.ptr)
        handle.tail_cache = ffi.cast("uint64_t *", self._device.ptr + _LINE)
        handle.refresh_lock = ffi.cast("uint32_t *", self._device.ptr + 2 * _LINE)
        handle.size_log2 = self.size_log2

    @property
    def device_handle(self) -> bytes:
        """A ProxycclFifo, to pass to a kernel by value (as proxyccl::Fifo)."""
        handle = ffi.new("ProxycclFifo *")
        self.fill_handle(handle)
        return bytes(ffi.buffer(handle))

    def close(self) -> None:
        """Frees the memory. Neither a kernel nor the proxy may use the ring any more."""
        super().close()
        self._device.close()
