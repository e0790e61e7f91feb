"""The device memory that one rank of a group allocates, by purpose."""

from __future__ import annotations

import threading
import weakref

from proxyccl.channels.segment.control import MEMORY_PURPOSES, ControlSegment, MemoryPurpose
from proxyccl.device.runtime import Memory, Runtime


class DeviceMemory:
    """Allocates a group's device memory on one rank, and keeps an account of the allocations that are alive.

    Args:
        runtime: allocates the memory.
        control: this rank's segment, in which `publish` stores the account.
    """

    def __init__(self, runtime: Runtime, control: ControlSegment) -> None:
        self._runtime, self._control = runtime, control
        self._purposes: weakref.WeakKeyDictionary[Memory, MemoryPurpose] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # guards insertions against iterations; no finalizer takes it

    def allocate(self, nbytes: int, purpose: MemoryPurpose) -> Memory:
        """Allocates zeroed device memory that peers can map. Raises ResourceError if too little memory is left."""
        memory = self._runtime.allocate(nbytes)
        self.add(memory, purpose)
        return memory

    def add(self, memory: Memory, purpose: MemoryPurpose) -> None:
        """Adds memory that another module has allocated to the account."""
        with self._lock:
            self._purposes[memory] = purpose

    def usage(self) -> dict[str, int]:
        """Returns the bytes of the live allocations for each of MEMORY_PURPOSES."""
        found: dict[str, int] = dict.fromkeys(MEMORY_PURPOSES, 0)
        with self._lock:
            pieces = list(self._purposes.items())
        for memory, purpose in pieces:
            if not memory.closed:
                found[purpose] += memory.nbytes
        return found

    def publish(self) -> None:
        """Stores the account in the rank's segment, where observers read it."""
        self._control.set_memory_usage(self.usage())
