"""Describes this machine's CPU."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path


def cpu_name() -> str:
    """Returns the CPU's model name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def describe_cpu() -> str:
    """Returns one line with the CPU's name, the number of cores that this process may run on, and the architecture."""
    return f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores, {platform.machine()}"
