"""Objects that the engine makes, or a named error."""

from __future__ import annotations

from typing import Any

from proxyccl.device.errors import ResourceError


def created(pointer: Any, what: str) -> Any:
    """The pointer that a function of the engine returned.

    Args:
        pointer: null if there was no memory for it.
        what: its description, for the error.

    Raises:
        ResourceError: it is null.
    """
    if not pointer:
        raise ResourceError(f"there is no memory for {what}")
    return pointer
