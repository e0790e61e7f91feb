"""Puts the checkers of tests/models into a directory: Relacy's headers and SPIN, of Debian.

python fetch_checkers.py DIRECTORY     exits with 0, or with 2 and the reason why they are not available here
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.debian_packages import Apt, fetch_program, fill_once, machine_suite, require_x86_64, unpack

PACKAGES = ("relacy-dev", "spin")


def fill(directory: Path) -> None:
    """Downloads and unpacks into `directory`."""
    require_x86_64("SPIN")
    with tempfile.TemporaryDirectory(dir=directory) as downloads:
        apt = Apt(Path(downloads, "apt"), machine_suite())
        unpack([apt.download(package) for package in PACKAGES], directory)


def fetch(directory: Path) -> None:
    """Fills `directory`, unless that was done before."""
    fill_once(directory, " ".join(PACKAGES), fill)


if __name__ == "__main__":
    fetch_program(fetch)
