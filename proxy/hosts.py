"""A name of this machine that no other machine has."""

from __future__ import annotations

import platform
from pathlib import Path


def host_name() -> str:
    """This machine's host name and boot id. The boot id tells apart machines with the same name."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()}/{boot_id.read_text().strip() if boot_id.exists() else ''}"
