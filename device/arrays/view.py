"""`ArrayView`, which describes an array of any library."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from proxyccl.device.arrays.dtypes import DType
from proxyccl.device.errors import ArgumentError


@dataclass(frozen=True)
class ArrayView:
    """Address, shape and type of a contiguous array in C order. The view keeps the array's `owner` alive."""

    ptr: int  # address of the first element
    shape: tuple[int, ...]  # elements in each dimension
    dtype: DType  # element type
    # Runtime ("host", "cuda", "hip") and device number; the number is -1 if the exporter does not report it.
    device: tuple[str, int]
    writable: bool  # whether the exporter allows writes
    owner: object

    @functools.cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def place(self) -> str:
        """The device in words: "cuda:1", or "cuda" if the exporter does not report the number."""
        runtime, number = self.device
        return runtime if number == -1 else f"{runtime}:{number}"

    @functools.cached_property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


def require_memory(address: int, shape: Sequence[int], argument: str) -> None:
    """Raises ArgumentError if an array has elements and its address is 0."""
    if not address and 0 not in shape:
        raise ArgumentError(argument, f"the array of shape {tuple(shape)} has no memory: its address is 0")


def require_contiguous(shape: Sequence[int], strides: Sequence[int] | None, dtype: DType, argument: str) -> None:
    """Raises ArgumentError unless an array is in C order. `strides` are in bytes; None means C order."""
    if strides is None or math.prod(shape) == 0:
        return
    expected = dtype.itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent != 1 and stride != expected:
            raise ArgumentError(
                argument,
                f"the array is not contiguous in C order (shape {tuple(shape)}, strides {tuple(strides)} bytes)",
            )
        expected *= extent
