"""Checks the pointers that the engine's constructors return."""

from __future__ import annotations

from typing import Any

from proxyccl.device.errors import ResourceError


def created(pointer: Any, what: str) -> Any:
    """Returns `pointer`, which a constructor of the engine returned, after a check.

    Args:
        pointer: null if the engine was out of memory.
        what: the object's description, for the error.

    Raises:
        ResourceError: the pointer is null.
    """
    if not pointer:
        raise ResourceError(f"there is no memory for {what}")
    return pointer
