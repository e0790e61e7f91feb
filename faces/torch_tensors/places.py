"""Divides an expert-parallel layer's memory into equal *places*; torch's allocator puts each output in a free one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from proxyccl.device.base_runtime import BaseRuntime, Memory
from proxyccl.device.errors import RuntimeUnavailableError
from proxyccl.device.memory import places
from proxyccl.torch_tensors.pools import allocator, require_torch

_POOL_CALLS = "_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool", "_cuda_releasePool"
"""The functions that torch.cuda.use_mem_pool calls. This module calls them directly, because use_mem_pool also handles
graph captures and so takes longer. No place is taken during a graph capture.
"""


def open_places(runtime: BaseRuntime, memory: Memory, offset: int, nbytes: int, count: int) -> OutputPlaces | None:
    """Makes `count` places of `nbytes` each in `memory`, from byte `offset` on; None if this torch has no pools."""
    try:
        require_torch(runtime.name)
    except RuntimeUnavailableError:
        return None
    if not all(hasattr(torch._C, name) for name in _POOL_CALLS):
        return None
    return OutputPlaces(runtime, memory, offset, nbytes, count)


class OutputPlaces:
    """The places that `open_places` makes. A place becomes free when all tensors in the place are freed and the work
    queued with these tensors has ended.
    """

    def __init__(self, runtime: BaseRuntime, memory: Memory, offset: int, nbytes: int, count: int) -> None:
        self._nbytes, self._device = nbytes, runtime.device
        made = allocator(torch, places.ALLOCATE, places.FREE).allocator()
        self._places = places.Places(runtime, memory, offset, nbytes, count)
        with torch.cuda.device(runtime.device):
            self._pool: Any = torch.cuda.MemPool(made)
        self._id = self._pool.id
        self._enter, self._leave, self._release = (getattr(torch._C, name) for name in _POOL_CALLS)
        self._makers: dict[torch.dtype, Callable[[], torch.Tensor]] = {}

    def take(self, dtype: torch.dtype) -> tuple[int, torch.Tensor] | None:
        """Takes a free place. Returns the place's index and a tensor of this dtype in the place. Returns None if no
        place is free, or if torch is configured to fill uninitialised memory.
        """
        if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:
            return None
        make = self._makers.get(dtype)
        if make is None:
            elements, device = self._nbytes // dtype.itemsize, torch.device("cuda", self._device)
            make = functools.partial(torch.empty_strided, (elements,), (1,), dtype=dtype, device=device)
            self._makers[dtype] = make
        self._places.choose()
        try:
            self._enter(self._device, self._id)
            try:
                whole = make()
            finally:
                self._leave(self._device, self._id)
                self._release(self._device, self._id)
        finally:
            self._places.leave()
        number = self._places.number_at(whole.data_ptr())
        return None if number is None else (number, whole)

    def close(self) -> None:
        """Ends the use of the places. torch frees unused places now, and used places when it next empties its cache."""
        self._pool = None
        self._places.close()
