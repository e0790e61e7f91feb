"""Checks strings and paths from callers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

from proxyccl.device.arguments.integers import find_items
from proxyccl.device.errors import ArgumentError

T = TypeVar("T", bound=str)


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


def as_choice(value: Any, argument: str, choices: Sequence[T]) -> T:
    """Returns `value` if it is one of the texts `choices`. Raises ArgumentError for anything else."""
    for choice in choices:
        if isinstance(value, str) and value == choice:
            return choice
    raise ArgumentError(argument, f"{value!r} is not one of {', '.join(map(repr, choices))}")


def choice_from(value: Any, argument: str, variable: str, choices: Sequence[T]) -> T | None:
    """Returns `value`, or if that is None the value of an environment variable; None if neither is given. Raises
    ArgumentError if the value is not one of the texts `choices`.
    """
    if value is None:
        value, argument = os.environ.get(variable) or None, variable
    return None if value is None else as_choice(value, argument, choices)
