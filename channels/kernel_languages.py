"""Kernels in languages other than C++. A face that compiles and launches such kernels registers here on import. So
`Communicator` can offer a call for each language, while this room does not depend on the faces.
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
    """Returns the function that makes kernels of a language.

    Raises:
        RuntimeUnavailableError: the language's face was not imported.
    """
    if language not in _makers:
        raise RuntimeUnavailableError(f"{language}: the program must import proxyccl.{language} first")
    return _makers[language]
