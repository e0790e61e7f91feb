"""Checks strings and paths from callers."""

from __future__ import annotations

import os
from typing import Any

from proxyccl.device.arguments.integers import find_items
from proxyccl.device.errors import ArgumentError


def require_text(value: Any, argument: str) -> str:
    """Returns a caller's string or path as a str.

    Raises ArgumentError for other objects, and for text that contains NUL or that UTF-8 can't encode.
    """
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise ArgumentError(argument, f"must be a string, not {type(value).__name__}")
    try:
        has_zero = b"\0" in text.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(argument, f"has a character that UTF-8 can't encode: {error}") from None
    if has_zero:
        raise ArgumentError(argument, "contains a NUL character, which would end the string in C")
    return text


def require_texts(values: Any, argument: str) -> tuple[str, ...]:
    """Returns a tuple of texts checked by `require_text`. Raises ArgumentError for anything else, also for a string."""
    texts = None if isinstance(values, str | bytes) else find_items(values)
    if texts is None:
        raise ArgumentError(argument, f"must be a sequence of strings, not {values!r}")
    return tuple(require_text(text, argument) for text in texts)
