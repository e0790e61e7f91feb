"""Puts iperf3 and libfabric's own fi_pingpong into a directory, for benchmarks/fabric_writes.py.

python fetch_network_peers.py DIRECTORY     exits with 0, or with 2 and the reason why they can't be had here
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from support.debian_packages import INSTALLED, Apt, fetch_program, fill_once, machine_suite, unpack
from support.fetch_fabric import link_psm

PACKAGES = ("iperf3", "libfabric-bin", "libfabric1")


def fill(directory: Path) -> None:
    """Downloads and unpacks into `directory`."""
    with tempfile.TemporaryDirectory(dir=directory) as downloads:
        apt = Apt(Path(downloads, "apt"), machine_suite(), INSTALLED)
        unpack(apt.download_with_dependencies(*PACKAGES), directory)
    link_psm(directory)


if __name__ == "__main__":
    fetch_program(lambda directory: fill_once(directory, " ".join(PACKAGES), fill))
