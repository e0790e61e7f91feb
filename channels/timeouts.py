"""Times that callers pass, and the bound of a wait."""

from __future__ import annotations

import numbers
import os
from typing import Any

from proxyccl.device.errors import ArgumentError

LONGEST_TIME = 1e9
"""The longest time in seconds that callers may pass. In nanoseconds, in which kernels count, it fits in 64 bits."""

DEFAULT_TIMEOUT = 30.0


def timeout_from(value: float | None) -> float:
    """Returns a time-out in seconds: `value`; for None the value of ``PROXYCCL_TIMEOUT``, else the default.

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
    """Checks a time in seconds that a caller passes: it must be above 0, or at least 0 if zero is allowed.

    Raises:
        ArgumentError: the value is not a valid number, or above `LONGEST_TIME`. `expected` describes the valid values.
    """
    known = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not known or not 0 <= value <= LONGEST_TIME or (value == 0 and not may_be_none):
        raise ArgumentError(argument, f"{expected}, at most {LONGEST_TIME:.0e}, not {value!r}")
    return float(value)
