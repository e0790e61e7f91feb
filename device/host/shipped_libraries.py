"""Finds the libraries of shipped kernels in an installation.

Only wheels contain these libraries, which `make wheel` builds. In other installations the host runtime compiles a
shipped kernel at its first use.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path


def group_of(file: str, dtype: str | None) -> str:
    """Returns the group of a shipped kernel: "experts", "norms", a reduction's element type, or "moves" for kernels
    that only move bytes. Each group is a library.
    """
    if file.startswith("experts/"):
        return "experts"
    return "norms" if file.endswith("rms_norm.h") else dtype or "moves"


@functools.cache
def shipped_library(group: str) -> Path | None:
    """Returns the path of a group's library, or None if the installation lacks it."""
    found = importlib.util.find_spec(f"proxyccl.device._kernels_{group}")  # finds the file without loading it
    return None if found is None or found.origin is None else Path(found.origin)


def ships_kernels() -> bool:
    """Whether this installation has the libraries."""
    return shipped_library("moves") is not None
