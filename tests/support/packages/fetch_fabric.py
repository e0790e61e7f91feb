"""Downloads libfabric and iproute2 into a directory, if they are not installed.

python fetch_fabric.py DIRECTORY     exits with 0, or with 2 and the reason why the packages are not available
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from support.packages.debian import fetch_program, fill_once, unpack_with_dependencies

PACKAGES = ("libfabric1", "iproute2")


def fetch(directory: Path, packages: tuple[str, ...]) -> None:
    """Fills `directory` with packages, including libfabric1, and their dependencies, unless it is already filled."""
    fill_once(directory, " ".join(packages), lambda directory: _fill(directory, packages))


def _fill(directory: Path, packages: tuple[str, ...]) -> None:
    unpack_with_dependencies(packages, directory)
    _link_psm(directory)


def _link_psm(directory: Path) -> None:
    """Links libpsm_infinipath, which libfabric needs, into libfabric's directory, as update-alternatives would when the
    package is installed.
    """
    (libfabric,) = directory.glob("usr/lib/*/libfabric.so.1")
    link = libfabric.with_name("libpsm_infinipath.so.1")
    for library in directory.glob("usr/lib/libpsm1/libpsm_infinipath.so.1.*"):
        link.symlink_to(Path("../libpsm1", library.name))


if __name__ == "__main__":
    fetch_program(lambda directory: fetch(directory, PACKAGES))
