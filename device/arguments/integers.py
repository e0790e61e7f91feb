"""Checks integers from callers, and rounds integers."""

from __future__ import annotations

import operator
from typing import Any

from proxyccl.device.errors import ArgumentError


def find_integer(value: Any) -> int | None:
    """Returns the value of an object with ``__index__``; returns None for other objects, and for True and False."""
    if type(value) is int:
        return value
    # Unlike numpy's bool arrays, torch's bool tensors have __index__.
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool":
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):  # torch raises RuntimeError for a tensor without values
        return None


def find_items(value: Any) -> list[Any] | None:
    """Returns the items of a caller's collection, in order; None if the value is not a collection."""
    try:
        return list(value)
    except TypeError:  # an array of 0 dimensions has __iter__, but raises TypeError
        return None


def find_extents(value: Any) -> list[Any] | None:
    """Returns a list of the extents of a shape, which may be a number or a collection; None for anything else."""
    return [value] if find_integer(value) is not None else find_items(value)


def as_integer(value: Any, argument: str, expected: str, lowest: int, highest: int | None = None) -> int:
    """Returns a caller's integer as an int. Raises ArgumentError if the value is not an integer, or is out of range.

    Args:
        value: the argument.
        argument: the argument's name in messages.
        expected: the error's description of valid values, such as "must be a rank from 0 to 3".
        lowest, highest: the valid range. With `highest` None there is no upper limit.
    """
    number = find_integer(value)
    if number is None or number < lowest or (highest is not None and number > highest):
        raise ArgumentError(argument, f"{expected}, not {value!r}")
    return number


def round_up(n: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `n`."""
    return -(-n // multiple) * multiple
