"""Checks flags from callers."""

from __future__ import annotations

from typing import Any

from proxyccl.device.errors import ArgumentError


def as_flag(value: Any, argument: str) -> bool:
    """Returns a caller's flag as a bool. Raises ArgumentError if the value is neither true nor false, such as an array
    of several elements.

    Args:
        value: the argument.
        argument: the argument's name in messages.
    """
    if value is True or value is False:
        return value
    try:
        return bool(value)
    except (TypeError, ValueError, RuntimeError):  # numpy's and torch's errors for arrays of several elements
        raise ArgumentError(argument, f"must be True or False, not {value!r}") from None
