"""Manages the memory that the daemon maps for one client.

Memory stays mapped while a worker may use it, even if the client has removed it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from proxyccl.device.errors import ArgumentError, ProtocolError
from proxyccl.device.memory.handle_cache import HandleCache
from proxyccl.device.runtime import Memory, PinnedMemory, Runtime
from proxyccl.proxy.service import ProxyService

REST_SECONDS = 4.0
"""The longest time, in seconds, to wait until the workers are idle. A request waits at most twice, so the client gets
its answer within the 10 s for which it waits.
"""
_QUIET_SECONDS = 0.05
_MOST_RETIRED = 4096

_Unmap = Callable[[], None]


class SessionMemories:
    """The mappings of a client's handles. Each mapping belongs to the object that needs it, such as a channel."""

    def __init__(self, proxy: ProxyService, runtime: Runtime) -> None:
        self._proxy = proxy
        self._runtime = runtime
        self._mappings = HandleCache(runtime.open)
        self._kept: dict[tuple[str, int], _Unmap] = {}
        self._retired: list[_Unmap] = []  # each function unmaps memory that a worker may still use

    def map(self, handle: bytes, nbytes: int, undo: contextlib.ExitStack) -> Memory:
        """Maps the memory that a handle names, until `undo` is closed. A closed mapping is not cached, because the
        owner may free the memory. Raises ArgumentError for memory that can't be mapped or is shorter than `nbytes`.
        """
        try:
            memory = self._mappings.acquire(handle)
        except ArgumentError:
            # If new memory has the address of freed memory that this process still maps, drivers may refuse the new
            # handle.
            if not self._retired or not self._proxy.drain(REST_SECONDS):
                raise
            self.unmap_retired()
            memory = self._mappings.acquire(handle)
        undo.callback(self._mappings.release, handle, keep=False)
        if memory.nbytes < nbytes:
            raise ArgumentError("nbytes", f"is {nbytes}, but the memory has {memory.nbytes} bytes")
        return memory

    def map_pinned(self, handle: bytes, undo: contextlib.ExitStack) -> PinnedMemory:
        """Maps pinned memory, until `undo` is closed. Raises ArgumentError if the memory cannot be mapped."""
        memory = self._runtime.open_pinned(handle)
        undo.callback(memory.close)
        return memory

    def keep(self, kind: str, number: int, unmap: _Unmap) -> None:
        """Stores `unmap`, to be called after the object is retired or replaced, or when the session ends."""
        replaced = self._kept.get((kind, number))
        self._kept[kind, number] = unmap
        self._retire(replaced)

    def retire(self, kind: str, number: int) -> None:
        """Unmaps an object's memory, if any, once the workers are idle, because then no copy is in flight."""
        self._retire(self._kept.pop((kind, number), None))

    def _retire(self, unmap: _Unmap | None) -> None:
        if unmap is None:
            return
        self._retired.append(unmap)
        self.unmap_if_quiet()
        if len(self._retired) > _MOST_RETIRED:
            raise ProtocolError(f"the client removed {_MOST_RETIRED} memories while its rings were never empty")

    @property
    def unmaps_later(self) -> bool:
        return bool(self._retired)

    def unmap_if_quiet(self) -> None:
        """Unmaps retired memory if the workers are idle, or become idle within a short wait."""
        if self._proxy.drain(_QUIET_SECONDS):
            self.unmap_retired()

    def unmap_retired(self) -> None:
        """Unmaps retired memory. The workers must be idle."""
        with contextlib.ExitStack() as each:  # calls every unmap, even if one raises
            while self._retired:
                each.callback(self._retired.pop())

    def close(self) -> None:
        """Unmaps all memory of the client. The client's service must have ended."""
        with contextlib.ExitStack() as each:
            each.callback(self._mappings.close)
            for unmap in self._kept.values():
                each.callback(unmap)
            self._kept.clear()
