"""The output buffers of a layer as arrays: memory of the workspace in which peers store rows, and from which they load.

Knows neither dispatch nor combine: it hands out buffers in turn, and finds the one in which an array lies.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from proxyccl.device.arrays import Array, ArrayView
from proxyccl.device.base_runtime import BaseRuntime, Memory
from proxyccl.device.dtypes import DType, as_dtype


class _Part:
    """A part of memory that its owner frees."""

    def __init__(self, owner: Memory, offset: int, nbytes: int) -> None:
        self._owner = owner
        self.ptr = owner.ptr + offset
        self.nbytes = nbytes

    @property
    def closed(self) -> bool:
        return self._owner.closed

    def close(self) -> None:
        """Does nothing."""


class OutputBuffers:
    """Buffers of equal size, which follow each other. The last is for the rows of a combine.

    Args:
        runtime: of the memory.
        memory: what they are part of.
        experts: the ProxycclExperts of the workspace.
    """

    def __init__(self, runtime: BaseRuntime, memory: Memory, experts: Any) -> None:
        self._runtime = runtime
        self._count, self._nbytes = int(experts.output_buffers), int(experts.output_bytes)
        self._scales_at = int(experts.output_scales)
        self._parts = [_Part(memory, experts.outputs + n * self._nbytes, self._nbytes) for n in range(self._count)]
        self._next = 0
        self._whole: dict[tuple[int, str], Any] = {}

    def take(self) -> int:
        """The number, from 1, of the buffer for the next output: each in turn, but for the last."""
        number = self._next
        self._next = (number + 1) % (self._count - 1)
        return number + 1

    @property
    def for_combine(self) -> int:
        """The number of the last."""
        return self._count

    def rows(self, number: int, like: Any, shape: tuple[int, ...], dtype: DType | str) -> Any:
        """The rows at the beginning of a buffer, as an array of `like`'s library."""
        return self._array(number, 0, like, shape, as_dtype(dtype))

    def scales(self, number: int, like: Any, shape: tuple[int, ...]) -> Any:
        """The scales of a buffer's rows, float32."""
        return self._array(number, self._scales_at, like, shape, as_dtype("float32"))

    def holding(self, view: ArrayView) -> int:
        """The number of the buffer at whose beginning an array lies; 0 if there is none."""
        return next((n for n, part in enumerate(self._parts, 1) if view.ptr == part.ptr and view.nbytes), 0)

    def _array(self, number: int, offset: int, like: Any, shape: tuple[int, ...], dtype: DType) -> Any:
        part, nbytes = self._parts[number - 1], int(np.prod(shape)) * dtype.itemsize
        if not hasattr(like, "new_empty") and (isinstance(like, Array) or self._runtime.name != "host"):
            return Array(self._runtime, _Part(part, offset, nbytes), shape, dtype)
        library = "torch" if hasattr(like, "new_empty") else "numpy"
        if (number, library) not in self._whole:
            whole = Array(self._runtime, part, (self._nbytes,), as_dtype("uint8"))
            made = sys.modules["torch"].from_dlpack(whole) if library == "torch" else np.asarray(whole)
            self._whole[number, library] = made
        some = self._whole[number, library][offset : offset + nbytes]
        element = getattr(sys.modules["torch"], dtype.name) if library == "torch" else dtype.numpy()
        return some.view(element).reshape(shape)
