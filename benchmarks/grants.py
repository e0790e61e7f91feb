"""Times reads of granted blocks and reads without a grant, alternately, between two processes of this host.

python benchmarks/grants.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from proxyccl.tools.results import write_json
from proxyccl.transfer import Agent, Transfer

CASES = ((1, 8), (1, 64 << 10), (100, 45 << 10), (10_000, 45 << 10))
"""The number of blocks, and the bytes of each block."""
TURNS, MOST_STARTS = 21, 200
SECONDS = 0.05  # of a turn


def rows_of(address: int, blocks: int, nbytes: int) -> Any:
    """Returns rows of (address, bytes) of blocks that are not adjacent."""
    addresses = np.uint64(address) + np.arange(blocks, dtype=np.uint64) * np.uint64(nbytes + 64)
    return np.column_stack((addresses, np.full_like(addresses, nbytes)))


def memory_of(blocks: int, nbytes: int) -> Any:
    return np.ones(blocks * (nbytes + 64), np.uint8)


def own() -> None:
    """Serves as the owner: prints the metadata, and then for each case the address of its blocks and a grant."""
    with Agent("owner") as agent:
        memory = memory_of(*CASES[-1])
        region = agent.register(memory)
        grants = [agent.grant(rows_of(region.address, *case)) for case in CASES]
        described = {"metadata": agent.metadata().hex(), "address": region.address}
        print(json.dumps({**described, "grants": [grant.encoded.hex() for grant in grants]}), flush=True)
        sys.stdin.read()


def turn(read: Transfer) -> float:
    """Returns the median time of a read in seconds."""
    times: list[float] = []
    while len(times) < MOST_STARTS and sum(times) < SECONDS:
        start = time.perf_counter()
        read.start().wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    parser.add_argument("--own", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.own:
        own()
        return
    command = [sys.executable, __file__, "--own"]
    results = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process, Agent("reader") as agent:
        assert process.stdin is not None
        assert process.stdout is not None
        owner = json.loads(process.stdout.readline())
        memory = memory_of(*CASES[-1])
        here = agent.register(memory)
        agent.add(bytes.fromhex(owner["metadata"]))
        for case, grant in zip(CASES, owner["grants"], strict=True):
            rows = np.insert(rows_of(owner["address"], *case), 0, rows_of(here.address, *case)[:, 0], 1)
            plain = agent.prepare("read", "owner", rows)
            granted = agent.prepare("read", "owner", rows, grant=bytes.fromhex(grant))
            turns = [(turn(plain), turn(granted)) for _ in range(TURNS)]
            without, with_grant = (1e6 * statistics.median(column) for column in zip(*turns, strict=True))
            added = 1e6 * statistics.median(second - first for first, second in turns)
            row = {"blocks": case[0], "bytes": case[1], "path": plain.path.name}
            results.append({**row, "plain_us": without, "granted_us": with_grant, "added_us": added})
            print(
                f"{case[0]:6} x {case[1]:6} B  {without:10.1f} us  with a grant {with_grant:10.1f} us  +{added:.1f} us"
            )
        process.stdin.close()
    if parsed.json:
        write_json(parsed.json, {"benchmark": "grants", "turns": TURNS, "results": results})


if __name__ == "__main__":
    main()
