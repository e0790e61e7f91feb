"""The arrays of a collective call: where they lie, and whether they fit each other."""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np

from proxyccl.channels.group import Group
from proxyccl.channels.memory import allocate, require_room
from proxyccl.device.arrays.array import Array, ArrayView, as_view
from proxyccl.device.errors import ArgumentError
from proxyccl.device.integers import as_integer, find_integer, find_items

LONGEST_TIME = 1e9
"""Seconds: what kernels count in 64-bit nanoseconds, with room to spare."""


def input_view(group: Group, x: Any, argument: str) -> ArrayView:
    """Where an argument of a call lies.

    Raises:
        ArgumentError: the group can't use it: it lies elsewhere, or is not aligned to its elements.
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


def output_view(
    group: Group, out: Any, default: Any, source: ArrayView, shape: tuple[int, ...]
) -> tuple[Any, ArrayView]:
    """What the caller gets back, and where it lies: `out`, else `default` (a call in place), else a new array.

    Raises:
        ArgumentError: it has another shape or type than wanted, or is read-only.
    """
    argument = "out"
    if out is None:
        argument = "x" if default is not None else "out"
        out = default if default is not None else new_like(group, source, shape)
    view = input_view(group, out, argument)
    if not view.writable:
        raise ArgumentError(argument, "the array is read-only")
    if view.dtype != source.dtype:
        raise ArgumentError(argument, f"has element type {view.dtype}; expected that of x, {source.dtype}")
    if view.shape != shape:
        raise ArgumentError(argument, f"has shape {view.shape}; expected {shape}")
    return out, view


def new_like(group: Group, source: ArrayView, shape: tuple[int, ...]) -> Any:
    """A new array for a result: torch's where the argument was, numpy's for arrays of the host, else one of `empty`."""
    require_room(shape, source.dtype)
    owner = source.owner
    if hasattr(owner, "new_empty"):  # a torch tensor
        return owner.new_empty(shape)
    if group.runtime.name == "host" and not isinstance(owner, Array):
        return np.empty(shape, source.dtype.numpy())
    return allocate(group, shape, source.dtype)


def share_shape(group: Group, source: ArrayView) -> tuple[int, ...]:
    """The shape of one rank's share of `x`. Raises ArgumentError if its first dimension does not divide evenly."""
    ranks = group.world_size
    if not source.shape or source.shape[0] % ranks:
        raise ArgumentError(
            "x", f"the first dimension of shape {source.shape} does not divide by the world size {ranks}"
        )
    return (source.shape[0] // ranks, *source.shape[1:])


def refuse_partial_overlap(whole: ArrayView, part: ArrayView, *, in_place: int = 0) -> None:
    """Input and output must be apart, or lie as those of a call in place do: `part` begins `in_place` bytes into
    `whole`. Raises ArgumentError.
    """
    apart = part.ptr + part.nbytes <= whole.ptr or whole.ptr + whole.nbytes <= part.ptr
    if not apart and part.ptr != whole.ptr + in_place:
        raise ArgumentError("out", "overlaps x in part; it must be apart from it or the same array")


def as_seconds(value: Any, argument: str, expected: str, *, may_be_none: bool = False) -> float:
    """A time that a caller gives, in seconds, above 0, or from 0 on if it may be none.

    Raises:
        ArgumentError: it is not such a number, or above `LONGEST_TIME`. `expected` says in words what it must be.
    """
    known = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not known or not 0 <= value <= LONGEST_TIME or (value == 0 and not may_be_none):
        raise ArgumentError(argument, f"{expected}, at most {LONGEST_TIME:.0e}, not {value!r}")
    return float(value)


def as_rank(world_size: int, rank: Any, argument: str) -> int:
    """The rank that a caller names. Raises ArgumentError unless it is one."""
    if type(rank) is int and 0 <= rank < world_size:  # at the cost of a repeated call
        return rank
    return as_integer(rank, argument, f"must be a rank from 0 to {world_size - 1}", 0, world_size - 1)


def as_ranks(world_size: int, ranks: Any, argument: str) -> list[int]:
    """Different ranks that a caller names, in the caller's order. Raises ArgumentError for anything else."""
    given = find_items(ranks)
    if given is None:
        raise ArgumentError(argument, f"expected ranks, not {ranks!r}")
    members: list[int] = []
    for rank in given:
        member = find_integer(rank)
        if member is None or not 0 <= member < world_size:
            raise ArgumentError(argument, f"{rank!r} is not a rank; expected 0 to {world_size - 1}")
        if member in members:
            raise ArgumentError(argument, f"rank {member} is given twice; expected different ranks")
        members.append(member)
    return members
