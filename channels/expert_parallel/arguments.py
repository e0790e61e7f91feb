"""Checks of the arrays that callers of expert-parallel calls pass in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxyccl.device.arrays import ArrayView
from proxyccl.device.dtypes import DType
from proxyccl.device.errors import ArgumentError

if TYPE_CHECKING:
    from proxyccl.channels.communicator import Communicator
    from proxyccl.channels.expert_parallel.context import DispatchCombineContext


def input_array(communicator: Communicator, x: Any, argument: str, shape: tuple[int, ...], dtype: str) -> ArrayView:
    """An argument of this shape, in which -1 stands for any number.

    Raises:
        ArgumentError: it has another shape or type, or lies where the communicator can't use it.
    """
    view = communicator.collectives.input(x, argument)
    if view.dtype.name != dtype:
        raise ArgumentError(argument, f"has element type {view.dtype}, {dtype} is wanted")
    if len(view.shape) != len(shape) or any(w not in (-1, n) for n, w in zip(view.shape, shape, strict=True)):
        wanted = ", ".join("any" if n == -1 else str(n) for n in shape)
        raise ArgumentError(argument, f"has shape {view.shape}, ({wanted}) is wanted")
    return view


def output_array(
    context: DispatchCombineContext,
    out: Any,
    source: ArrayView,
    shape: tuple[int, ...],
    dtype: DType,
    *,
    spare_rows: bool = False,
) -> tuple[Any, ArrayView]:
    """What the caller gets back, and where it lies: `out`, or a new array like the source's.

    Raises:
        ArgumentError: `out` does not fit, is read-only, or overlaps the source.
    """
    if out is None:
        out = context.new_array(source.owner, shape, dtype)
    wanted = (-1, *shape[1:]) if spare_rows else shape
    view = input_array(context.communicator, out, "out", wanted, dtype.name)
    if view.shape[0] < shape[0]:
        raise ArgumentError("out", f"has {view.shape[0]} rows, {shape[0]} are needed")
    if not view.writable:
        raise ArgumentError("out", "the array is read-only")
    if view.ptr < source.ptr + source.nbytes and source.ptr < view.ptr + view.nbytes:
        raise ArgumentError("out", "overlaps another array of the call")
    return out, view
