"""Which machine this is, by a name that no other has."""

from __future__ import annotations

import platform
from pathlib import Path


def host_name() -> str:
    """This machine's name, and its boot id, which tells apart hosts of one name."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()}/{boot_id.read_text().strip() if boot_id.exists() else ''}"
