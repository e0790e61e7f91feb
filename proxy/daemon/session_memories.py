"""The memory that the daemon maps for one client: registered with its proxy, or exposed to peers on other hosts.

Regardless of the client's requests, memory stays mapped as long as a worker may be using it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

from proxyccl.device.errors import ArgumentError, ProtocolError, ProxyCCLError
from proxyccl.device.memory.handle_cache import HandleCache
from proxyccl.device.runtime import Memory, PinnedMemory, Runtime
from proxyccl.proxy.daemon.protocol import (
    AddMemory,
    AddPinnedMemory,
    AddRemoteMemory,
    Done,
    MemoryAdded,
    RemoveMemory,
)
from proxyccl.proxy.service import ProxyService

REST_SECONDS = 4.0
"""Seconds for which a worker may be kept from resting. A request waits for two rests at most, and clients for 10 s."""
_QUIET_SECONDS = 0.05
_MOST_RETIRED = 4096

_Unmap = Callable[[], None]


class SessionMemories:
    """Mappings by handle, and the memory ids that name them.

    Args:
        proxy: the client's service.
        runtime: opens the client's handles.
    """

    def __init__(self, proxy: ProxyService, runtime: Runtime) -> None:
        self._proxy = proxy
        self._runtime = runtime
        self._mappings = HandleCache(runtime.open)
        # By first id: size, and a function that unmaps the memory; None for memory that is not mapped here.
        self._registered: dict[int, tuple[int, _Unmap | None]] = {}
        self._retired: list[_Unmap] = []  # unmap what the worker may still be using

    def handle(self, request: AddMemory | AddPinnedMemory | AddRemoteMemory | RemoveMemory) -> MemoryAdded | Done:
        """Carries out a request."""
        match request:
            case AddMemory():
                return self._add_mapped(request)
            case AddPinnedMemory(handle=handle):
                return self._add_pinned(handle)
            case AddRemoteMemory(address=address, nbytes=nbytes, key=key):
                return self._register(nbytes, None, lambda: self._proxy.add_remote_memory(address, nbytes, key))
            case RemoveMemory(first=first):
                return self._remove(first)

    def _add_mapped(self, request: AddMemory) -> MemoryAdded:
        handle, nbytes, key = request.handle, request.nbytes, request.key
        if nbytes == 0:
            return self._register(0, None, lambda: self._proxy.add_memory(0, 0, key))
        memory = self.map(handle, nbytes)
        unmap = functools.partial(self.unmap, handle)
        return self._register(nbytes, unmap, lambda: self._proxy.add_memory(memory.ptr, nbytes, key))

    def _add_pinned(self, handle: bytes) -> MemoryAdded:
        memory = self.open_pinned(handle)
        return self._register(memory.nbytes, memory.close, lambda: self._proxy.add_pinned_memory(memory))

    def _register(self, nbytes: int, unmap: _Unmap | None, add: Callable[[], int]) -> MemoryAdded:
        try:
            with self._proxy.paused(REST_SECONDS):  # a trigger may name an id before the client knows it
                first = add()
        except ProxyCCLError:
            if unmap is not None:
                unmap()
            raise
        self._registered[first] = nbytes, unmap
        return MemoryAdded(first)

    def _remove(self, first: int) -> Done:
        if first not in self._registered:
            raise ProtocolError(f"first: no memory of this client begins at id {first}")
        nbytes, unmap = self._registered[first]
        with self._proxy.paused(REST_SECONDS):
            self._proxy.remove_memory(first, nbytes)
        del self._registered[first]
        if unmap is not None:
            self.retire(unmap)
        return Done()

    def map(self, handle: bytes, nbytes: int) -> Memory:
        """Maps the memory that a handle names. Each call is paired with an `unmap`.

        Raises:
            ArgumentError: it cannot be mapped, or has fewer than `nbytes` bytes.
        """
        try:
            memory = self._mappings.acquire(handle)
        except ArgumentError:
            # A driver may refuse memory in the place of other memory that its owner freed and that is still mapped
            # here.
            if not self._retired or not self._proxy.drain(REST_SECONDS):
                raise
            self.unmap_retired()
            memory = self._mappings.acquire(handle)
        if memory.nbytes < nbytes:
            self.unmap(handle)
            raise ArgumentError("nbytes", f"is {nbytes}, but the memory has {memory.nbytes} bytes")
        return memory

    def open_pinned(self, handle: bytes) -> PinnedMemory:
        """Maps pinned memory. Raises ArgumentError if that can't be."""
        return self._runtime.open_pinned(handle)

    def unmap(self, handle: bytes) -> None:
        """Ends `map`. The memory must no longer be in use. Its owner may free it: so it is not kept mapped."""
        self._mappings.release(handle, keep=False)

    def retire(self, unmap: _Unmap) -> None:
        """Calls `unmap` when the worker has nothing to do: until then copies may be in flight."""
        self._retired.append(unmap)
        self.unmap_if_quiet()
        if len(self._retired) > _MOST_RETIRED:
            raise ProtocolError(f"the client removed {_MOST_RETIRED} memories while its rings were never empty")

    @property
    def unmaps_later(self) -> bool:
        """Whether functions passed to `retire` were not called yet."""
        return bool(self._retired)

    def unmap_if_quiet(self) -> None:
        """Calls them, if the worker has nothing to do soon."""
        if self._proxy.drain(_QUIET_SECONDS):
            self.unmap_retired()

    def unmap_retired(self) -> None:
        """Calls all functions passed to `retire`. The worker must have nothing to do."""
        with contextlib.ExitStack() as each:  # continues after one that raises
            while self._retired:
                each.callback(self._retired.pop())

    def close(self) -> None:
        """Unmaps everything. The service must have ended."""
        with contextlib.ExitStack() as each:
            each.callback(self._mappings.close)
            for _, unmap in self._registered.values():
                if unmap is not None:
                    each.callback(unmap)
            self._registered.clear()
