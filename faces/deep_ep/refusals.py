"""Keywords of DeepEP's forks and later versions, and features that ProxyCCL lacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def refuse(what: str, reason: str) -> NotImplementedError:
    """The error for a feature that is not supported."""
    return NotImplementedError(f"proxyccl.deep_ep has no {what}: {reason}")


def refuse_unknown(call: str, options: Mapping[str, Any]) -> None:
    """Ignores keywords that are None or False, as callers of forks pass many, and refuses others by name."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise refuse(f"{call}({name}=)", "DeepEP does not have it either")
