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

    _caches: ClassVar[weakref.WeakSet[HandleCache]] = weakref.WeakSet()  # those of ranks that are threads among them
    _caches_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, open_handle: Callable[[bytes], Memory], keep: int = 64) -> None:
        self._open = open_handle
        self._keep = keep
        self._used: dict[bytes, tuple[Memory, int]] = {}
        self._idle: OrderedDict[bytes, Memory] = OrderedDict()
        self._lock = threading.Lock()  # held while a driver maps: another cache's users don't wait for that
        with self._caches_lock:
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
            if not self._unmap_idle():
                raise
            return self._open(handle)

    def _unmap_idle(self) -> bool:
        """Unmaps what nobody uses, in all caches but those that are in use just now. Whether there was any."""
        with self._caches_lock:
            others = [cache for cache in self._caches if cache is not self]
        unmapped = self._unmap_own_idle()
        for cache in others:
            if cache._lock.acquire(blocking=False):  # it may be waiting for this one
                try:
                    unmapped |= cache._unmap_own_idle()
                finally:
                    cache._lock.release()
        return unmapped

    def _unmap_own_idle(self) -> bool:
        had = bool(self._idle)
        while self._idle:
            self._idle.popitem()[1].close()
        return had

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
            for memory, _ in self._used.values():
                memory.close()
            self._used.clear()
            self._unmap_own_idle()
