"""The rings through which kernels pass triggers to the proxy: allocates their memory, and reads their contents.

Reading a ring disturbs neither the producers nor the proxy. The proxy does not clear the slots of taken triggers, so a
ring also holds the last triggers that the proxy has handled.
"""

from __future__ import annotations

import ctypes
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from proxyccl.device._native import ffi as native
from proxyccl.device.arguments.integers import as_integer
from proxyccl.device.errors import ArgumentError
from proxyccl.device.runtime import PinnedMemory, Runtime
from proxyccl.proxy._engine import ffi
from proxyccl.proxy.codec import Message
from proxyccl.proxy.trigger import PARITY_SHIFT, Trigger, full_parity, operation_name

if TYPE_CHECKING:
    from proxyccl.device._native import ProxycclFifo  # the compiled module does not define this type

_LINE_BYTES = 128
"""Distance in bytes between words with different writers: two cache lines, because some processors fetch lines in
pairs.
"""
_SLOT_BYTES: int = ffi.sizeof("ProxycclTrigger")


def require_ring_size(size: object) -> int:
    """Returns the number of slots. Raises ArgumentError if a ring can't have that number of slots."""
    expected = f"must be a power of two from 2 to {1 << 20}"
    slots = as_integer(size, "fifo_size", expected, 2, 1 << 20)
    if slots & (slots - 1):
        raise ArgumentError("fifo_size", f"{expected}, not {slots}")
    return slots


def ring_bytes(size: int) -> int:
    """Returns the size in bytes of the pinned memory for a ring with this number of slots."""
    return size * _SLOT_BYTES + _LINE_BYTES


class RingTrigger(Message, frozen=True):
    """A trigger in a ring: the ticket, and the fields of a `Trigger` with the operation as text."""

    ticket: int
    channel: int
    operation: str
    size: int
    src_memory: int
    src_offset: int
    dst_memory: int
    dst_offset: int
    value: int | None = None


class RingContents(Message, frozen=True):
    """A ring's contents at one moment.

    Attributes:
        size: number of slots.
        taken: the number of triggers that the proxy has taken, which is the ticket of the next trigger that it takes.
        full: number of slots with triggers that the proxy has not taken.
        waiting: the first triggers that the proxy has not taken, in order.
        recent: the last triggers that the proxy took, in order.
    """

    size: int
    taken: int
    full: int
    waiting: list[RingTrigger]
    recent: list[RingTrigger]


class Ring:
    """The part of a ring that a worker uses: the slots, followed by the tail. Another process may have created the
    ring.

    Args:
        memory: zeroed memory of at least `ring_bytes(size)` bytes, which must stay mapped while the ring is read.
        size: number of slots, a power of two from 2 to 2**20.
    """

    def __init__(self, memory: PinnedMemory, size: int) -> None:
        self.pinned = memory
        self.size = require_ring_size(size)
        self.size_log2 = self.size.bit_length() - 1
        self.slots_host = memory.host_ptr  # the CPU's address of the slots
        self.tail_host = self.slots_host + self.tail_offset  # the CPU's address of the tail
        self.slots: Any = ffi.cast("ProxycclTrigger *", self.slots_host)
        self.tail: Any = ffi.cast("uint64_t *", self.tail_host)

    @property
    def tail_offset(self) -> int:
        """The tail's offset from the first slot, in bytes."""
        return self.size * _SLOT_BYTES

    @property
    def taken(self) -> int:
        return int(self.tail[0])

    def count_full(self) -> tuple[int, int]:
        """Returns `taken`, and the number of slots with triggers that the proxy has not taken.

        The full slots are contiguous, so a binary search finds the last full slot.
        """
        taken, low, step = self.taken, 0, 1
        while low + step <= self.size and self._holds(taken + low + step - 1):
            low += step
            step *= 2
        while step > 1:
            step //= 2
            if low + step <= self.size and self._holds(taken + low + step - 1):
                low += step
        return taken, low

    def _holds(self, ticket: int) -> bool:
        parity = self.slots[ticket % self.size].word1 >> PARITY_SHIFT
        return bool(parity == full_parity(ticket, self.size_log2))

    def snapshot(self, count: int = 32) -> RingContents:
        """Returns the ring's contents at this moment, with at most `count` waiting and `count` recent triggers."""
        import numpy as np  # imported here, because only this method needs numpy

        slots = np.frombuffer(ctypes.string_at(self.slots_host, self.tail_offset), np.uint64).reshape(-1, 2)
        taken = self.taken  # `taken` is read after the slots, so that no taken trigger is listed as waiting

        def held(first: int, end: int) -> list[int]:
            tickets = np.arange(first, end, dtype=np.uint64)
            parities = slots[tickets % np.uint64(self.size), 1] >> np.uint64(PARITY_SHIFT)
            return [int(ticket) for ticket in tickets[parities == full_parity(tickets, self.size_log2)]]

        def decoded(tickets: list[int]) -> list[RingTrigger]:
            found = ((ticket, Trigger.decode(*map(int, slots[ticket % self.size]))) for ticket in tickets)
            return [
                RingTrigger(n, **{**asdict(each), "operation": operation_name(each.operation)}) for n, each in found
            ]

        waiting, recent = held(taken, taken + self.size), held(max(0, taken - count), taken)
        return RingContents(self.size, taken, len(waiting), decoded(waiting[:count]), decoded(recent))

    def close(self) -> None:
        """Frees the memory. Kernels and the proxy must no longer use the ring."""
        self.pinned.close()


class Fifo(Ring):
    """A ring of triggers that kernels push to and one proxy worker drains.

    Args:
        runtime: the runtime whose kernels push.
        size: number of slots, a power of two from 2 to 2**20. A ring may have fewer slots than producers.
    """

    def __init__(self, runtime: Runtime, size: int = 8192) -> None:
        size = require_ring_size(size)
        super().__init__(runtime.allocate_pinned(ring_bytes(size)), size)
        self.device_memory = runtime.allocate(3 * _LINE_BYTES)  # the words that only producers use

    def fill_handle(self, handle: ProxycclFifo) -> None:
        slots = self.pinned.ptr
        handle.slots = native.cast("ProxycclTrigger *", slots)
        handle.tail = native.cast("uint64_t *", slots + self.tail_offset)
        handle.head = native.cast("uint64_t *", self.device_memory.ptr)
        handle.tail_cache = native.cast("uint64_t *", self.device_memory.ptr + _LINE_BYTES)
        handle.refresh_lock = native.cast("uint32_t *", self.device_memory.ptr + 2 * _LINE_BYTES)
        handle.size_log2 = self.size_log2
        handle.size, handle.size_mask = 1 << self.size_log2, (1 << self.size_log2) - 1

    @property
    def device_handle(self) -> bytes:
        """The ring as a ProxycclFifo, which a kernel takes by value as proxyccl::Fifo."""
        handle = native.new("ProxycclFifo *")
        self.fill_handle(handle[0])
        return bytes(native.buffer(handle))

    def close(self) -> None:
        super().close()
        self.device_memory.close()
