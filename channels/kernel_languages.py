"""Kernels in other languages than C++: a face that compiles and launches them registers here when it is imported.

So `Communicator` has a call for each, and this room does not know the faces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxyccl.device.errors import RuntimeUnavailableError

_makers: dict[str, Callable[..., Any]] = {}


def register(language: str, maker: Callable[..., Any]) -> None:
    """Registers a language. `maker` takes a communicator and its caller's arguments."""
    _makers[language] = maker


def maker_of(language: str) -> Callable[..., Any]:
    """The function that makes kernels of a language.

    Raises:
        RuntimeUnavailableError: its face was not imported.
    """
    if language not in _makers:
        raise RuntimeUnavailableError(f"{language}: the program must import proxyccl.{language} first")
    return _makers[language]
