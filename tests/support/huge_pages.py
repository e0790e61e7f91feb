"""Huge pages of shared memory, as the kernel tells them."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import pytest

HUGE_PAGE = 2 << 20

_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")


def _can_be_asked_for() -> bool:
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    return (
        release is not None
        and tuple(map(int, release.groups())) >= (6, 1)
        and _SIZE.exists()
        and int(_SIZE.read_text()) == HUGE_PAGE
    )


needs_huge_pages = pytest.mark.skipif(
    not _can_be_asked_for(), reason="needs Linux 6.1 with transparent huge pages of 2 MiB"
)


def bytes_in_huge_pages(address: int) -> int:
    """How many bytes of the mapping that begins at an address this process reaches through huge pages."""
    mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    (mapping,) = (found for found in mappings if found.startswith(f"{address:x}-"))
    mapped = re.search(r"^ShmemPmdMapped: *(\d+) kB", mapping, re.MULTILINE)
    assert mapped is not None
    return int(mapped[1]) * 1024
