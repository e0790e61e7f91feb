"""Small helper functions."""

from __future__ import annotations

from typing import Any


def value_or(value: Any, default: Any) -> Any:
    """Returns the value, or the default if the value is None."""
    return default if value is None else value
