"""Parts of tensors in a holder's memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from proxyccl.device.arguments.integers import as_integer
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.codec import Message, Uint64

FLOATS = ("float32", "float16", "bfloat16")
"""The element types that can be cast to each other, and to FLOAT8 with scales."""
FLOAT8 = "float8_e4m3fn"

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
        scales: only for a target's float8 elements with scales: "tensor" if the whole tensor has one scale, "block" if
            each block of the tensor has a scale; else "".
        amax: the address of the greatest magnitude of each block (amax.py), in memory of a source that measures them;
            else 0.
    """

    tensor: Annotated[str, Meta(max_length=4096)]
    dtype: Annotated[str, Meta(max_length=64)]
    itemsize: Annotated[int, Meta(ge=1, le=64)]
    size: _Numbers
    start: _Numbers
    shape: _Numbers
    address: Uint64
    strides: _Numbers
    scales: Literal["", "tensor", "block"] = ""
    amax: Uint64 = 0

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

    def address_of(self, index: Sequence[int]) -> int:
        """Returns the address of the element with this index in the tensor."""
        shifts = zip(index, self.start, self.strides, strict=True)
        return self.address + sum((at - first) * stride for at, first, stride in shifts)


def strides_of(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Returns the strides, in bytes, of a contiguous array in C order."""
    strides: list[int] = []
    for extent in reversed(shape):
        strides.insert(0, itemsize)
        itemsize *= extent
    return tuple(strides)


def require_castable(there: Part, here: Part, source: str, target: str) -> None:
    """Raises ArgumentError unless the elements of a source's part can be moved, or cast, to a target's part. `source`
    and `target` are the holders' names.
    """
    tensor, given, wanted = here.tensor, there.dtype, here.dtype
    if here.scales:
        if given not in FLOATS:
            kinds = ", ".join(FLOATS)
            raise ArgumentError("sources", f"{tensor}: {target} makes scales, which needs one of {kinds}, not {given}")
        if not there.amax:
            raise ArgumentError(
                "sources", f"{tensor}: {target} makes scales, but {source} was made without WeightSource(amax=True)"
            )
    elif given in FLOATS and wanted == FLOAT8:
        raise ArgumentError("targets", f"{tensor}: {target} has {wanted} without scales; pass scale= to add")
    elif given != wanted and not (given in FLOATS and wanted in FLOATS):
        raise ArgumentError("targets", f"{tensor}: {target} has dtype {wanted!r}, to which {given!r} is not cast")


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
    strides = strides_of(view.shape, view.dtype.itemsize)
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
    return Part(tensor, view.dtype.name, view.dtype.itemsize, *box, address, strides)
