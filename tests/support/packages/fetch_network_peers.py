"""Downloads iperf3 and libfabric's fi_pingpong into a directory, for benchmarks/fabric_writes.py.

python fetch_network_peers.py DIRECTORY     exits with 0, or with 2 and the reason why the programs are not available
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from support.packages.debian import fetch_program
from support.packages.fetch_fabric import fetch

if __name__ == "__main__":
    fetch_program(lambda directory: fetch(directory, ("iperf3", "libfabric-bin", "libfabric1")))
