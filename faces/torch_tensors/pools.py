"""Provides a torch memory pool whose tensors are in memory that peers can access."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

from proxyccl.channels.group import Group
from proxyccl.device.errors import RuntimeUnavailableError
from proxyccl.device.memory import memory_pool

NEEDED = "torch 2.8 or later is needed, where a pool's memory is freed by the pool's own allocator"


def pool_for(group: Group) -> contextlib.AbstractContextManager[Any]:
    """Implements `Communicator.memory_pool`."""
    group.failure.require_usable()
    torch = require_torch(group.runtime.name)
    use = next((kept for kept in group.kept if isinstance(kept, PoolUse)), None)
    if use is None:
        use = PoolUse(torch, group)
        group.keep(use)
    return _allocating(torch, use.pool, group.runtime.device)


@contextlib.contextmanager
def _allocating(torch: Any, pool: Any, device: int) -> Iterator[Any]:
    with torch.cuda.use_mem_pool(pool, device=device):
        yield pool


def require_torch(runtime: str) -> Any:
    """Returns the torch module. Raises RuntimeUnavailableError if its pools can't allocate this runtime's memory."""
    if runtime == "host":
        raise RuntimeUnavailableError(
            "memory_pool: the communicator uses the host runtime; torch has pools only on GPUs"
        )
    try:
        import torch
    except ImportError as error:
        raise RuntimeUnavailableError(f"memory_pool: torch can't be imported: {error}") from None
    built_for = "hip" if torch.version.hip else "cuda" if torch.version.cuda else "the CPU alone"
    if built_for != runtime:
        raise RuntimeUnavailableError(
            f"memory_pool: torch {torch.__version__} is built for {built_for}; the communicator uses {runtime}"
        )
    # torch up to 2.7 (MemPoolContext) frees a pool's memory by the default allocator unless the pool is in use.
    if not hasattr(torch.cuda, "MemPool") or hasattr(torch.cuda, "MemPoolContext"):
        raise RuntimeUnavailableError(f"memory_pool: this is torch {torch.__version__}; {NEEDED}")
    return torch


@functools.cache
def allocator(torch: Any, allocate: str = memory_pool.ALLOCATE, free: str = memory_pool.FREE) -> Any:
    """Returns torch's allocator object for two C functions that memory_pool.h or places.h declares. The object is never
    freed, because torch calls the functions as long as memory from them exists.
    """
    return torch.cuda.memory.CUDAPluggableAllocator(memory_pool.library(), allocate, free)


class PoolUse:
    """A group's use of the pool that all groups on its device share; the last group's `close` destroys the pool.

    Attributes:
        pool: the torch.cuda.MemPool.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _pools: ClassVar[dict[int, tuple[Any, int]]] = {}  # by device: the pool and its number of users
    _outlived: ClassVar[list[Any]] = []  # pools that graphs still use, so torch must not destroy them

    def __init__(self, torch: Any, group: Group) -> None:
        if group.crosses_namespaces:
            raise RuntimeUnavailableError(
                "memory_pool: its memory does not pass PID namespaces, and peers are in others; register tensors of "
                "torch with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True instead"
            )
        self._device = group.runtime.device
        segments = memory_pool.MemoryPool(group.runtime)
        with self._lock:
            known = self._pools.get(self._device)
            if known is None:
                with torch.cuda.device(self._device):
                    known = torch.cuda.MemPool(allocator(torch).allocator()), 0
            self.pool, users = known
            self._pools[self._device] = self.pool, users + 1
        group.symmetric.follow(segments)

    def close(self) -> None:
        """Ends the group's use of the pool. Remaining tensors keep their memory."""
        with self._lock:
            pool, users = self._pools.pop(self._device)
            if users > 1:
                self._pools[self._device] = pool, users - 1
            elif pool.use_count() > 1:
                self._outlived.append(pool)
        self.pool = None
