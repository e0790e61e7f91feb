"""Checks times and time-outs that callers pass."""

from __future__ import annotations

import numbers
import os
from typing import Any

from proxyccl.device.errors import ArgumentError

LONGEST_TIME = 1e9
"""The longest time in seconds that callers may pass. In nanoseconds, in which kernels count, it fits in 64 bits."""

DEFAULT_TIMEOUT = 30.0


def timeout_from(value: float | None) -> float:
    """Returns `value` as a time-out in seconds. None means ``PROXYCCL_TIMEOUT`` if set, else the default.

    Raises:
        ArgumentError: the value is not a positive number of seconds.
    """
    if value is None:
        text = os.environ.get("PROXYCCL_TIMEOUT")
        if not text:
            return DEFAULT_TIMEOUT
        try:
            value = float(text)
        except ValueError:
            raise ArgumentError("PROXYCCL_TIMEOUT", f"must be a number of seconds, not {text!r}") from None
    return as_seconds(value, "timeout", "must be a positive number of seconds")


def as_seconds(value: Any, argument: str, expected: str, *, may_be_none: bool = False) -> float:
    """Returns `value` as a time in seconds. The value must be above 0, or at least 0 if `may_be_none`.

    Raises:
        ArgumentError: the value is not a valid number, or above `LONGEST_TIME`. `expected` describes valid values in
            the error.
    """
    known = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not known or not 0 <= value <= LONGEST_TIME or (value == 0 and not may_be_none):
        raise ArgumentError(argument, f"{expected}, at most {LONGEST_TIME:.0e}, not {value!r}")
    return float(value)
