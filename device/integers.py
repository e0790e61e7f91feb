"""Integers that callers give: Python's, numpy's and torch's, and whatever else can be an index."""

from __future__ import annotations

import operator
from typing import Any

from proxyccl.device.errors import ArgumentError


def find_integer(value: Any) -> int | None:
    """The number that an object with ``__index__`` stands for, else None. True and False are not numbers here."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_integer(value: Any, argument: str, expected: str, lowest: int, highest: int | None = None) -> int:
    """The number that a caller gave.

    Args:
        value: what was given.
        argument: the caller's name for it, for messages.
        expected: what it must be, in words: "must be a rank from 0 to 3".
        lowest, highest: the range; None for any from the lowest on.

    Raises:
        ArgumentError: it is not an integer, or out of the range.
    """
    number = find_integer(value)
    if number is None or number < lowest or (highest is not None and number > highest):
        raise ArgumentError(argument, f"{expected}, not {value!r}")
    return number
