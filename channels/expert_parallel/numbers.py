"""Numbers that callers give: any integer, such as numpy's, within bounds."""

from __future__ import annotations

from typing import Any

from proxyccl.device.arguments.integers import as_integer

MAX_NUMBER = 2**31 - 1
"""The greatest that kernels and messages between ranks take."""


def whole_number(argument: str, value: Any, least: int, most: int = MAX_NUMBER, what: str = "an integer") -> int:
    """An argument as an int. `what` it should be is for the error.

    Raises:
        ArgumentError: it is not an integer from `least` to `most`. A bool is not one.
    """
    if type(value) is int and least <= value <= most:  # at the cost of a repeated call
        return value
    expected = f"from {least} to {most}" if most < MAX_NUMBER else f"of at least {least}, and at most {most}"
    return as_integer(value, argument, f"must be {what} {expected}", least, most)
