"""Checks the numbers and arrays that programs pass to expert-parallel calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxyccl.channels.arguments import input_view, overlap, require_writable
from proxyccl.channels.group import Group
from proxyccl.device.arguments.integers import as_integer
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.arrays.dtypes import DType
from proxyccl.device.errors import ArgumentError

MAX_NUMBER = 2**31 - 1
"""The greatest integer that kernels and messages between ranks can hold."""
OVERLAPS = "overlaps another array of the call"
"""The text of the error for a result that would overwrite an array that the call reads."""


def whole_number(argument: str, value: Any, least: int, most: int = MAX_NUMBER, what: str = "an integer") -> int:
    """Returns an argument as an int. Raises ArgumentError unless the argument is an integer, and not a bool, from
    `least` to `most`; `what` describes the expected value in the error.
    """
    if type(value) is int and least <= value <= most:  # handles the common case first, because as_integer takes longer
        return value
    expected = f"from {least} to {most}" if most < MAX_NUMBER else f"of at least {least}, and at most {most}"
    return as_integer(value, argument, f"must be {what} {expected}", least, most)


def input_array(
    group: Group, x: Any, argument: str, shape: tuple[int, ...], dtype: str, *, spare_rows: bool = False
) -> ArrayView:
    """Returns a view of an argument. Raises ArgumentError if the shape of `x` differs from `shape` (in which -1 accepts
    any extent), if `x` has another type than `dtype`, or if the group can't use the memory of `x`. With `spare_rows`,
    `x` may have more rows than `shape`.
    """
    view = input_view(group, x, argument)
    if view.dtype.name != dtype:
        raise ArgumentError(argument, f"has element type {view.dtype}; expected {dtype}")
    wanted = (-1, *shape[1:]) if spare_rows else shape
    if len(view.shape) != len(shape) or any(w not in (-1, n) for n, w in zip(view.shape, wanted, strict=True)):
        expected = ", ".join("any" if n == -1 else str(n) for n in wanted)
        raise ArgumentError(argument, f"has shape {view.shape}; expected ({expected})")
    if view.shape[0] < shape[0]:
        raise ArgumentError(argument, f"has {view.shape[0]} rows; expected at least {shape[0]}")
    return view


def index_array(group: Group, x: Any, argument: str, shape: tuple[int, ...]) -> ArrayView:
    """Returns a view of an argument as `input_array` does; the argument's elements must be int32 or int64."""
    dtype = input_view(group, x, argument).dtype.name
    if dtype not in ("int32", "int64"):
        raise ArgumentError(argument, f"has element type {dtype}; expected int32 or int64")
    return input_array(group, x, argument, shape, dtype)


def output_array(
    group: Group,
    out: Any,
    given: Mapping[str, Any],
    shape: tuple[int, ...],
    dtype: DType,
    *,
    spare_rows: bool = False,
) -> int:
    """Returns the address of the caller's `out` array for the result of a call on the arrays `given`, by their names.
    Raises ArgumentError if `out` does not fit, is read-only, or overlaps one of these arrays."""
    view = input_array(group, out, "out", shape, dtype.name, spare_rows=spare_rows)
    require_writable(view, "out")
    if any(overlap(view, input_view(group, x, argument)) for argument, x in given.items()):
        raise ArgumentError("out", OVERLAPS)
    return view.ptr
