"""Memory that staged peers may write and read, and the limits of staging areas."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from proxyccl.device.errors import ResourceError
from proxyccl.proxy import _engine

ffi, lib = _engine.ffi, _engine.lib

STAGING_BYTES = range(4096, (64 << 20) + 1)
"""Bytes of pinned memory per peer and direction."""

STAGING_CHUNK = range(64, (32 << 20) + 1)
"""Bytes of a put that are staged at a time."""

MOST_WIRES: int = lib.PROXYCCL_STAGED_WIRES
"""The most wires of a staged connection."""


class RemoteWriteTargets:
    """The ranges of this rank's memory that peers may write by staged puts and read by staged gets. Threads and engines
    may share the object.

    A peer names a range by its key. The engine refuses a key that has been removed.
    """

    def __init__(self) -> None:
        self._table = ffi.new("ProxycclRemoteWriteTarget[]", lib.PROXYCCL_STAGED_WRITE_TARGETS)
        self._free = deque(range(lib.PROXYCCL_STAGED_WRITE_TARGETS))  # the key removed first is reused first
        self._lock = threading.Lock()

    @property
    def table(self) -> Any:
        """The table for the engine, which lives as long as this object."""
        return self._table

    def add(self, ptr: int, nbytes: int, host_ptr: int = 0) -> int:
        """Adds a range, and its address for the CPU unless `host_ptr` is 0. Returns the range's key.

        Raises:
            ResourceError: the table is full.
        """
        with self._lock:
            if not self._free:
                raise ResourceError(
                    f"{lib.PROXYCCL_STAGED_WRITE_TARGETS} memories are registered for staged peers already"
                )
            key = self._free.popleft()
            lib.proxyccl_remote_write_target_set(self._table + key, ptr, nbytes, host_ptr)
            return key

    def remove(self, key: int) -> None:
        """Removes the range of a key, which peers' triggers must no longer name."""
        with self._lock:
            lib.proxyccl_remote_write_target_set(self._table + key, 0, 0, 0)
            self._free.append(key)
