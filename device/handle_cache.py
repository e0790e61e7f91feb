"""Mappings of memory that other processes exported, kept for a while when nobody uses them."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import ClassVar

from proxyccl.device.errors import ArgumentError
from proxyccl.device.runtime import Memory


class HandleCache:
    """Mappings of memory that others exported, by handle. The most recently used stay mapped when nobody uses them.

    A handle names the memory itself and not its address, so a cached mapping is never a stale one. But a driver may
    refuse to map what took the place of memory that its owner has freed, as long as that is mapped: then all idle
    mappings of this process go.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()  # ranks that are threads have caches of their own
    _caches: ClassVar[weakref.WeakSet[HandleCache]] = weakref.WeakSet()

    def __init__(self, open_handle: Callable[[bytes], Memory], keep: int = 64) -> None:
        self._open = open_handle
        self._keep = keep
        self._used: dict[bytes, tuple[Memory, int]] = {}
        self._idle: OrderedDict[bytes, Memory] = OrderedDict()
        with self._lock:
            self._caches.add(self)

    def acquire(self, handle: bytes) -> Memory:
        """Maps the memory, or finds it mapped. Each call is paired with a `release`."""
        with self._lock:
            memory, users = self._used.get(handle, (None, 0))
            if memory is None:
                memory = self._idle.pop(handle, None) or self._map(handle)
            self._used[handle] = (memory, users + 1)
            return memory

    def _map(self, handle: bytes) -> Memory:
        try:
            return self._open(handle)
        except ArgumentError:
            idle = [cache._idle for cache in self._caches if cache._idle]
            if not idle:
                raise
            for mappings in idle:
                while mappings:
                    mappings.popitem()[1].close()
            return self._open(handle)

    def release(self, handle: bytes) -> None:
        """Ends one use."""
        with self._lock:
            memory, users = self._used[handle]
            if users > 1:
                self._used[handle] = (memory, users - 1)
                return
            del self._used[handle]
            self._idle[handle] = memory
            if len(self._idle) > self._keep:
                self._idle.popitem(last=False)[1].close()

    def close(self) -> None:
        """Unmaps everything."""
        with self._lock:
            for memory in (*(memory for memory, _ in self._used.values()), *self._idle.values()):
                memory.close()
            self._used.clear()
            self._idle.clear()
