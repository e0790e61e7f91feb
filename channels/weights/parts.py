"""Parts of tensors in a holder's memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta

from proxyccl.device.arguments.integers import as_integer
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.codec import Message, Uint64

_Numbers = Annotated[tuple[Uint64, ...], Meta(max_length=64)]


class Part(Message, frozen=True):
    """A box-shaped part of a tensor, and its place in a holder's memory.

    Attributes:
        tensor: the tensor's name.
        dtype: the name of the tensor's element type.
        itemsize: the size of an element in bytes.
        size: the shape of the whole tensor.
        start, shape: the index of the part's first element in the tensor, and the part's shape.
        address: the address of the part's first element.
        strides: for each dimension, the bytes from one element to the next.
    """

    tensor: Annotated[str, Meta(max_length=4096)]
    dtype: Annotated[str, Meta(max_length=64)]
    itemsize: Annotated[int, Meta(ge=1, le=64)]
    size: _Numbers
    start: _Numbers
    shape: _Numbers
    address: Uint64
    strides: _Numbers

    def __post_init__(self) -> None:
        if not len(self.size) == len(self.start) == len(self.shape) == len(self.strides):
            raise ValueError("size, start, shape and strides are of different lengths")
        if any(begin + extent > whole for begin, extent, whole in zip(self.start, self.shape, self.size, strict=True)):
            raise ValueError("the box lies outside of the tensor")

    @property
    def nbytes(self) -> int:
        """The total size of the part's elements in bytes."""
        return math.prod(self.shape) * self.itemsize

    @property
    def end(self) -> tuple[int, ...]:
        """For each dimension, the index in the tensor after the part's last element."""
        return tuple(begin + extent for begin, extent in zip(self.start, self.shape, strict=True))


def part_of(
    tensor: str,
    view: ArrayView,
    start: Sequence[int] | None = None,
    size: Sequence[int] | None = None,
    within: Any = (),
) -> Part:
    """Describes the part of a tensor in an array. Takes the arguments of `Holder.add`."""
    if (start is None) != (size is None):
        raise ArgumentError("size", "expected both start and size, or neither")
    slices = within if isinstance(within, tuple) else (within,)
    if len(slices) > len(view.shape) or not all(isinstance(each, slice) for each in slices):
        raise ArgumentError("within", f"expected slices of an array of {len(view.shape)} dimensions, not {within!r}")
    strides: list[int] = []
    step = view.dtype.itemsize
    for extent in reversed(view.shape):
        strides.insert(0, step)
        step *= extent
    address, shape = view.ptr, list(view.shape)
    for dim, each in enumerate(slices):
        first, last, stride = each.indices(view.shape[dim])
        if stride != 1:
            raise ArgumentError("within", "expected slices with a step of 1")
        shape[dim] = max(0, last - first)
        address += first * strides[dim]
    begins = [0] * len(shape) if start is None else list(start)
    whole = list(shape) if size is None else list(size)
    if len(begins) != len(shape) or len(whole) != len(shape):
        raise ArgumentError("start", f"{tensor}: expected an index for each of {len(shape)} dimensions")
    for dim, extent in enumerate(shape):
        whole[dim] = as_integer(
            whole[dim], "size", f"{tensor}: must be at least {extent} in dimension {dim}", extent, 2**62
        )
        most = whole[dim] - extent
        begins[dim] = as_integer(
            begins[dim], "start", f"{tensor}: must be from 0 to {most} in dimension {dim}", 0, most
        )
    box = (tuple(whole), tuple(begins), tuple(shape))
    return Part(tensor, view.dtype.name, view.dtype.itemsize, *box, address, tuple(strides))
