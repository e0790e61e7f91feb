"""Downloads Debian packages, and dependencies that are not installed, into a directory.

python fetch_packages.py DIRECTORY PACKAGE...  exits with 0, or with 2 and the reason why the packages are not available
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from support.packages.debian import fetch_program, fill_once, unpack_with_dependencies


def fetch(directory: Path, packages: Sequence[str]) -> None:
    """Fills `directory` with the packages, unless it is already filled."""
    fill_once(directory, " ".join(packages), lambda directory: unpack_with_dependencies(packages, directory))


if __name__ == "__main__":
    fetch_program(lambda directory: fetch(directory, sys.argv[2:]))
