"""Checks the arrays of a collective call: their memory, and whether their shapes and types match."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from proxyccl.channels.calls._calls import MOST_DIMENSIONS
from proxyccl.channels.group import Group
from proxyccl.channels.memory import allocate, require_room
from proxyccl.device.arrays.array import Array, ArrayView, as_view
from proxyccl.device.arrays.dtypes import DType, as_dtype
from proxyccl.device.arrays.libraries import from_torch, libraries
from proxyccl.device.errors import ArgumentError


def input_view(group: Group, x: Any, argument: str) -> ArrayView:
    """Returns a view of an argument of a call.

    Raises:
        ArgumentError: the group can't use the array, because it is on another device or not aligned to its elements.
    """
    group.failure.require_usable()
    runtime = group.runtime
    view = as_view(x, argument, gpu=runtime.name)
    here = f"the communicator uses {runtime.name}:{runtime.device}"
    if view.device[0] != runtime.name or view.device[1] not in (-1, runtime.device):
        raise ArgumentError(argument, f"the array lies on {view.place}, {here}")
    if view.device[1] == -1 and view.nbytes and (device := runtime.pointer_device(view.ptr)) != runtime.device:
        raise ArgumentError(argument, f"the array lies on device {device}, {here}")
    if view.ptr % view.dtype.itemsize:
        raise ArgumentError(argument, f"the array is not aligned to its element size of {view.dtype.itemsize} bytes")
    return view


def readable_view(group: Group, x: Any, argument: str) -> ArrayView:
    """Views an array that C can't read, such as one of another library or of many dimensions, in a form that C can
    read. Raises the same errors as `input_view`.
    """
    return as_readable(group, input_view(group, x, argument))


def as_readable(group: Group, view: ArrayView) -> ArrayView:
    """Converts a view from `input_view` to a form that C can read."""
    runtime = group.runtime
    shape = view.shape
    if len(shape) > MOST_DIMENSIONS:  # joins the dimensions between the first and the last
        shape = (shape[0], math.prod(shape[1:-1]), shape[-1])
    return ArrayView(view.ptr, shape, view.dtype, (runtime.name, runtime.device), view.writable, view.owner)


def flat_view(group: Group, x: Any, argument: str, *, in_bytes: bool) -> ArrayView:
    """Returns a one-dimensional view of an array; if `in_bytes` is set, a view of the array's bytes."""
    if in_bytes and libraries[type(x)].is_torch:
        x = from_torch(x, argument, in_bytes=True)
    view = input_view(group, x, argument)
    dtype = as_dtype("uint8") if in_bytes else view.dtype
    return ArrayView(view.ptr, (view.nbytes // dtype.itemsize,), dtype, view.device, view.writable, view.owner)


def output_view(group: Group, out: Any, x: Any, source: ArrayView, shape: tuple[int, ...] | None) -> ArrayView:
    """Returns the view of `out`.

    Args:
        out, x: the caller's arrays, which may be the same.
        source: the view of `x`.
        shape: shape of the result; None if `out` may have any shape.

    Raises:
        ArgumentError: `out` has a wrong shape or type, or is read-only.
    """
    argument, view = ("x", source) if out is x else ("out", input_view(group, out, "out"))
    require_writable(view, argument)
    if view.dtype != source.dtype:
        raise ArgumentError(argument, f"has element type {view.dtype}; expected the type of x, {source.dtype}")
    if shape not in (None, view.shape):
        raise ArgumentError(argument, f"has shape {view.shape}; expected {shape}")
    return view


def require_writable(view: ArrayView, argument: str) -> None:
    if not view.writable:
        raise ArgumentError(argument, "the array is read-only")


def new_like(group: Group, source: ArrayView, shape: tuple[int, ...], dtype: DType | None = None) -> Any:
    """Allocates an array for a result. If `source` views a torch tensor, the result is a torch tensor. Otherwise the
    result is an `Array`, except that on the host runtime the result is a numpy array unless `source` views an `Array`.
    `dtype` None means the element type of `source`.
    """
    made, owner = dtype or source.dtype, source.owner
    require_room(shape, made)
    if hasattr(owner, "new_empty"):  # a torch tensor
        return owner.new_empty(shape, dtype=None if dtype is None else getattr(sys.modules["torch"], dtype.name))
    if group.runtime.name == "host" and not isinstance(owner, Array):
        return np.empty(shape, made.numpy())
    return allocate(group, shape, made)


def rows_of_all(group: Group, source: ArrayView) -> tuple[int, ...]:
    """Returns the shape of the concatenation of all ranks' `x`."""
    return (group.world_size * source.shape[0], *source.shape[1:]) if source.shape else (group.world_size,)


def share_shape(group: Group, source: ArrayView) -> tuple[int, ...]:
    """Returns the shape of one rank's share of `x`. Raises ArgumentError if the first dimension of `x` is not a
    multiple of the number of ranks.
    """
    ranks = group.world_size
    if not source.shape or source.shape[0] % ranks:
        raise ArgumentError(
            "x", f"the first dimension of shape {source.shape} does not divide by the world size {ranks}"
        )
    return (source.shape[0] // ranks, *source.shape[1:])


def overlap(a: ArrayView, b: ArrayView) -> bool:
    return a.ptr < b.ptr + b.nbytes and b.ptr < a.ptr + a.nbytes


def refuse_partial_overlap(rank: int, source: ArrayView, target: ArrayView) -> None:
    """Raises ArgumentError if input and output overlap, unless both begin at the same address, or the smaller is this
    rank's share of the larger (an in-place call).
    """
    part, whole = (target, source) if target.nbytes < source.nbytes else (source, target)
    share = rank * part.nbytes if part.nbytes < whole.nbytes else 0
    if part.ptr != whole.ptr + share and overlap(part, whole):
        raise ArgumentError("out", "overlaps x in part; expected the same array, or memory apart from x")
