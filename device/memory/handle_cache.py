"""A cache of mappings of memory that other processes exported."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from typing import ClassVar

from proxyccl.device.base_runtime import Memory
from proxyccl.device.errors import AlreadyMappedError, ArgumentError
from proxyccl.device.memory.lease_cache import LeaseCache
from proxyccl.device.process import forks

_POLL_SECONDS = 0.001


class HandleCache:
    """Mappings of memory that other processes exported, by handle. The most recently used mappings stay mapped while
    unused.

    A handle names the memory itself and not its address, so a cached mapping is never stale. But while this process
    still maps freed memory, a driver may refuse to map new memory of the same address at its owner: then all idle
    mappings of this process are removed. In a daemon the old memory may be mapped for another client that has yet to
    close it: `acquire` then waits for at most PATIENCE seconds.

    Args:
        open_handle: maps memory.
        keep: most unused mappings that are kept.
        below: the cache from which `open_handle` leases.
    """

    PATIENCE: ClassVar[float] = 5.0

    _caches: ClassVar[weakref.WeakSet[HandleCache]] = weakref.WeakSet()  # all caches of the process
    _caches_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self, open_handle: Callable[[bytes], Memory], keep: int = 64, *, below: HandleCache | None = None
    ) -> None:
        self._open, self._below = open_handle, below
        self._holders = 1
        self._mappings: LeaseCache[bytes, Memory] = LeaseCache(lambda memory: memory.close(), keep=keep)
        with self._caches_lock:
            self._caches.add(self)

    def acquire(self, handle: bytes) -> Memory:
        """Returns the memory, mapped unless it is already. Each call is paired with a `release`."""
        return self._mappings.acquire(handle, lambda: self._map(handle))

    def _map(self, handle: bytes) -> Memory:
        deadline = time.monotonic() + self.PATIENCE
        while True:
            try:
                return self._open(handle)
            except AlreadyMappedError:
                if not self._unmap_idle() and time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_SECONDS)
            except ArgumentError:
                if not self._unmap_idle():
                    raise

    def _unmap_idle(self) -> bool:
        """Unmaps unused memory, in all caches of this process. Returns whether there was any."""
        with self._caches_lock:
            caches = list(self._caches)
        unmapped = False
        for cache in caches:
            unmapped |= cache._mappings.discard_idle()
        return unmapped

    def lease(self, handle: bytes) -> Memory:
        """Does what `acquire` does, for a cache on top of this one: closing the result releases the memory."""
        return _Leased(self, handle)

    def release(self, handle: bytes, *, keep: bool = True) -> None:
        """Ends one use. Without `keep`, also unmaps the memory if nobody else uses it. That is for memory that its
        owner frees, because drivers keep freed memory until it is unmapped everywhere.
        """
        self._mappings.release(handle, keep=keep)
        if not keep and self._below is not None:
            self._below._mappings.discard(handle)

    def hold(self) -> HandleCache:
        """Adds a holder, which must also call `close`. Returns this cache."""
        with self._caches_lock:
            self._holders += 1
        return self

    def close(self) -> None:
        """Ends a hold. When the last holder has called it, all memory is unmapped."""
        with self._caches_lock:
            self._holders -= 1
            if self._holders:
                return
        self._mappings.close()


class _Leased:
    """A mapping of a `HandleCache`, in use until it is closed."""

    def __init__(self, cache: HandleCache, handle: bytes) -> None:
        memory = cache.acquire(handle)
        self.ptr, self.nbytes = memory.ptr, memory.nbytes
        self._cache, self._handle = cache, handle
        self.closed = False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._cache.release(self._handle)


forks.hold_while_forking(HandleCache._caches_lock)
