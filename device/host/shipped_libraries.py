"""The libraries of shipped kernels that an installation may have.

`make wheel` builds them (setup.py), for machines without a compiler. In other installations the host runtime
compiles a shipped kernel at its first use.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path


def group_of(file: str, dtype: str | None) -> str:
    """Returns the name of the group to which a file's kernel belongs: "experts", "norms", the element type of a
    reduction, or "moves" for kernels that only move bytes. `dtype` is the element type, or None.
    """
    if file.startswith("experts/"):
        return "experts"
    return "norms" if file.endswith("rms_norm.h") else dtype or "moves"


@functools.cache
def shipped_library(group: str) -> Path | None:
    """Returns the installation's library of a group of shipped kernels; None if the installation lacks it."""
    found = importlib.util.find_spec(f"proxyccl.device._kernels_{group}")  # finds the file without loading it
    return None if found is None or found.origin is None else Path(found.origin)


def ships_kernels() -> bool:
    """Whether this installation has the libraries."""
    return shipped_library("moves") is not None
