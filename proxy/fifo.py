"""Rings that own their memory: slots and tail in pinned host memory, the producers' words in device memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxyccl.device._native import ffi
from proxyccl.device.runtime import PinnedMemory, Runtime
from proxyccl.proxy.ring import LINE_BYTES, RingMemory, require_ring_size, ring_bytes

if TYPE_CHECKING:
    from proxyccl.device._native import ProxycclFifo  # exists only in the stub


class Ring(RingMemory):
    """The part of a ring that a proxy worker uses: slots and tail. Another process may have created the ring.

    Args:
        memory: zeroed memory of at least `ring_bytes(size)` bytes.
        size: number of slots, a power of two from 2 to 2**20.
    """

    def __init__(self, memory: PinnedMemory, size: int) -> None:
        super().__init__(memory.host_ptr, size)
        self.pinned = memory

    def close(self) -> None:
        """Frees the memory. Kernels and the proxy must no longer use the ring."""
        self.pinned.close()


class Fifo(Ring):
    """A ring of triggers that kernels push to and one proxy worker drains.

    Args:
        runtime: the runtime whose kernels push.
        size: number of slots, a power of two from 2 to 2**20. The size may be smaller than the number of producers.
    """

    def __init__(self, runtime: Runtime, size: int = 8192) -> None:
        size = require_ring_size(size)
        super().__init__(runtime.allocate_pinned(ring_bytes(size)), size)
        self._device = runtime.allocate(3 * LINE_BYTES)

    def fill_handle(self, handle: ProxycclFifo) -> None:
        """Fills a ProxycclFifo with the device's addresses."""
        slots = self.pinned.ptr
        handle.slots = ffi.cast("ProxycclTrigger *", slots)
        handle.tail = ffi.cast("uint64_t *", slots + self.tail_offset)
        handle.head = ffi.cast("uint64_t *", self._device.ptr)
        handle.tail_cache = ffi.cast("uint64_t *", self._device.ptr + LINE_BYTES)
        handle.refresh_lock = ffi.cast("uint32_t *", self._device.ptr + 2 * LINE_BYTES)
        handle.size_log2 = self.size_log2
        handle.size, handle.size_mask = 1 << self.size_log2, (1 << self.size_log2) - 1

    @property
    def device_handle(self) -> bytes:
        """The ring as a ProxycclFifo, which a kernel takes by value as proxyccl::Fifo."""
        handle = ffi.new("ProxycclFifo *")
        self.fill_handle(handle[0])
        return bytes(ffi.buffer(handle))

    def close(self) -> None:
        """Frees the memory. Kernels and the proxy must no longer use the ring."""
        super().close()
        self._device.close()
