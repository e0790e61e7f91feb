"""The memory ids of a service: which are in use, and the entries of each in the engine's and the kernels' tables."""

from __future__ import annotations

from typing import Any

from proxyccl.device.errors import ResourceError
from proxyccl.proxy import _engine
from proxyccl.proxy.shared_words import SharedWords
from proxyccl.proxy.trigger import MAX_MEMORIES, WINDOW_BYTES

ffi, lib = _engine.ffi, _engine.lib


def windows_of(nbytes: int) -> int:
    """The number of memory ids for a size: one for each window of 4 GiB."""
    return max(1, -(-nbytes // WINDOW_BYTES))


class MemoryTable:
    """Assigns ids to memory, consecutive ids if the memory exceeds a window of 4 GiB. The caller serialises all calls.

    Args:
        service: a ProxycclService.
        shared: the memory where kernels read the limits of memories.
    """

    def __init__(self, service: Any, shared: SharedWords) -> None:
        self._service = service
        self._limits = shared.memory_limits
        self._used = [False] * MAX_MEMORIES

    def add(
        self,
        address: int,
        nbytes: int,
        key: int,
        *,
        remote_only: bool = False,
        host: int | None = None,
        first: int | None = None,
    ) -> int:
        """Registers memory under free ids. Returns the first id.

        Args:
            address: the memory's address for transports.
            nbytes: its size.
            key: the memory's key for remote transports; 0 for none.
            remote_only: whether only a remote link reaches the memory, so that no copy may use `address`.
            host: the memory's address for the CPU; None if the CPU may not access the memory.
            first: the first id, which another service chose; None to choose one here.

        Raises:
            ResourceError: not enough consecutive ids are free.
        """
        windows = windows_of(nbytes)
        if first is None:
            first = self._find(windows)
        for i in range(windows):
            offset = i * WINDOW_BYTES
            here = ffi.NULL if host is None else ffi.cast("char *", host + offset)
            self._set(first + i, address + offset, nbytes - offset, key, remote_only=remote_only, host=here)
            self._used[first + i] = True
        return first

    def remove(self, first: int, nbytes: int) -> None:
        """Frees the ids of a memory of `nbytes` bytes. Triggers must no longer name these ids."""
        for i in range(windows_of(nbytes)):
            self._set(first + i, 0, 0, 0, remote_only=False, host=ffi.NULL)
            self._used[first + i] = False

    def _set(self, memory: int, address: int, nbytes: int, key: int, *, remote_only: bool, host: Any) -> None:
        self._limits[memory] = nbytes
        base = ffi.cast("char *", address)
        lib.proxyccl_service_set_memory(self._service, memory, base, nbytes, key, remote_only, host)

    def _find(self, windows: int) -> int:
        run = 0
        for i, used in enumerate(self._used):
            run = 0 if used else run + 1
            if run == windows:
                return i - windows + 1
        raise ResourceError(
            f"no {windows} consecutive memory ids are free of {MAX_MEMORIES}: "
            f"{sum(self._used)} are in use; close memories that are no longer needed"
        )
