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
    """Maps memory that other processes exported, and keeps unused mappings for later calls with the same handle.

    No two allocations have equal handles, so a cached mapping is never stale. But while this process still maps memory
    that its owner has freed, a driver may refuse to map the owner's new memory if its address is the same. After such a
    refusal, `acquire` unmaps all unused mappings of this process and tries again. If a mapping is in use, for example
    by another client of the node daemon, `acquire` retries for at most PATIENCE seconds.

    Args:
        open_handle: maps the memory of a handle.
        keep: the number of unused mappings to keep; the most recently used mappings are kept.
        below: the cache whose `lease` is `open_handle`, if any.
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
        """Returns a handle's memory, and maps it if necessary. Each call needs one call of `release`."""
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
        with self._caches_lock:
            caches = list(self._caches)
        unmapped = False
        for cache in caches:
            unmapped |= cache._mappings.discard_idle()
        return unmapped

    def lease(self, handle: bytes) -> Memory:
        """Acquires a handle's memory. Closing the returned object releases the memory."""
        return _Leased(self, handle)

    def release(self, handle: bytes, *, keep: bool = True) -> None:
        """Ends one use of a handle's memory. Without `keep`, also unmaps memory without other users, because drivers
        keep memory that its owner has freed until all processes have unmapped it.
        """
        self._mappings.release(handle, keep=keep)
        if not keep and self._below is not None:
            self._below._mappings.discard(handle)

    def hold(self) -> HandleCache:
        """Adds a user of this cache, who must call `close`. Returns this cache."""
        with self._caches_lock:
            self._holders += 1
        return self

    def close(self) -> None:
        """Removes a user of this cache. When there is no user left, all memory is unmapped."""
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
