"""Output buffers whose arrays stay as long as somebody has them, as new arrays would.

A buffer is free again when the last array in it is gone. On the host runtime that is all there is to know. On a GPU,
work that uses an array may still be queued when it goes, on several streams. torch's caching allocator knows them
(`record_stream`), so there it hands out the buffers, as places of a pool.
"""

from __future__ import annotations

import weakref
from typing import Any

from proxyccl.channels import torch_pool
from proxyccl.channels.expert_parallel.arrays import MemoryPart
from proxyccl.channels.expert_parallel.output_buffers import NO_BUFFER, OutputBuffers, TakenBuffer
from proxyccl.device.base_runtime import BaseRuntime, Memory
from proxyccl.device.errors import RuntimeUnavailableError
from proxyccl.device.memory import places

KEPT_OUTPUTS = 2
"""Outputs that callers have at once as a rule: those of two halves of a batch overlap."""


class KeptOutputs(OutputBuffers):
    """Buffers that are taken while they are free. Rows pass the last one where no other is, or where nobody would know
    when the arrays are gone: on a GPU those of other libraries than torch, and of a torch without pools; in a graph,
    which may run again when they are; and on other streams than the current one.
    """

    def __init__(self, runtime: BaseRuntime, memory: Memory, experts: Any) -> None:
        super().__init__(runtime, memory, experts)
        self._memory, self._at = memory, int(experts.outputs)
        self._free = set(range(1, self._count))  # on the host runtime
        self._torch: Any = None
        self._pool: Any = None
        self._places: places.Places | None = None
        self._was_opened = False

    @property
    def passing(self) -> int:
        """The number of the last."""
        return self._count

    def take(self, like: Any, *, on_current_stream: bool) -> TakenBuffer:
        """A free buffer, or the last one, which rows only pass."""
        if self._runtime.name != "host":
            return self._take_from_torch(like) if on_current_stream and hasattr(like, "new_empty") else self._passed()
        try:
            number = self._free.pop()
        except KeyError:
            return self._passed()
        part = MemoryPart(self._memory, self._at + (number - 1) * self._nbytes, self._nbytes)
        weakref.finalize(part, self._free.add, number).atexit = False
        return TakenBuffer(number, self._make_whole(part, like))

    def take_for_combine(self, like: Any, *, on_current_stream: bool) -> TakenBuffer:
        """A free buffer, or none."""
        taken = self.take(like, on_current_stream=on_current_stream)
        return NO_BUFFER if taken.passed else taken

    def close(self) -> None:
        """Ends the use of the memory. Arrays that are still there keep it."""
        self._pool = None  # torch then frees the places whose arrays are gone; others when it next empties its cache
        if self._places is not None:
            self._places.close()
            self._places = None

    def _passed(self) -> TakenBuffer:
        return TakenBuffer(self._count, passed=True)

    def _take_from_torch(self, like: Any) -> TakenBuffer:
        if not self._was_opened:
            self._was_opened = True
            self._open_pool()
        if self._pool is None or self._places is None or _fills_new_tensors(self._torch):
            return self._passed()
        with self._places.chosen(), self._torch.cuda.use_mem_pool(self._pool, device=like.device):
            whole = like.new_empty(self._nbytes, dtype=self._torch.uint8)
        number = self._places.number_at(whole.data_ptr())
        return self._passed() if number is None else TakenBuffer(number + 1, whole)

    def _open_pool(self) -> None:
        try:
            self._torch = torch_pool.require_torch(self._runtime.name)
        except RuntimeUnavailableError:
            return
        made = torch_pool.allocator(self._torch, places.ALLOCATE, places.FREE).allocator()
        self._places = places.Places(self._runtime, self._memory, self._at, self._nbytes, self._count - 1)
        with self._torch.cuda.device(self._runtime.device):
            self._pool = self._torch.cuda.MemPool(made)


def _fills_new_tensors(torch: Any) -> bool:
    """Whether torch writes to every tensor that it makes, be it a place or not."""
    return bool(torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory)
