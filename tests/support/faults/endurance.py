"""Hours of the campaign's work without a fault: what drifts? python tests/support/faults/endurance.py --minutes 60

Each rank says in the middle of the first tenth of the time and at its end: resident memory, descriptors, threads, and
the median time of a small all_reduce by kernels and by the proxy.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np

from proxyccl import Communicator
from support.faults.work import Work
from support.processes import FileBootstrap, run_processes

_CALLS = 300
_SEED = 11


def resident_bytes() -> int:
    """What of this process is in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def latency(comm: Communicator, algorithm: str | None) -> float:
    """Median seconds of a small all_reduce."""
    x, times = comm.empty(64, "float32").fill(1), []
    for _ in range(_CALLS):
        began = time.perf_counter()
        comm.all_reduce(x, algorithm=algorithm)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measure(comm: Communicator) -> dict[str, float]:
    """What may drift."""
    gc.collect()
    return {
        "memory, MB": round(resident_bytes() / 1e6, 1),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "by kernels, us": round(1e6 * latency(comm, None), 1),
        "by the proxy, us": round(1e6 * latency(comm, "proxy"), 1),
    }


def work(minutes: float) -> None:
    """One rank's work."""
    comm = Communicator(FileBootstrap.from_environment())
    mine, steps, seconds = Work(comm, _SEED), 0, 60 * minutes
    began, first = time.monotonic(), None
    while not mine.agree(time.monotonic() - began > seconds):
        for _ in range(10):
            mine.step()
            steps += 1
        if first is None and mine.agree(time.monotonic() - began > seconds / 20):
            first = measure(comm)
    print(json.dumps({"rank": comm.rank, "steps": steps, "first": first, "last": measure(comm)}))
    mine.close()
    comm.close()


def main() -> None:
    """The command line; with RANK in the environment, one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="how long the ranks work")
    parser.add_argument("--ranks", type=int, default=3, help="how many there are")
    arguments = parser.parse_args()
    if "RENDEZVOUS" in os.environ:
        np.seterr(all="raise")
        work(arguments.minutes)
        return
    given = ("--minutes", str(arguments.minutes))
    for rank, ended in enumerate(
        run_processes(arguments.ranks, Path(__file__), *given, timeout=60 * arguments.minutes + 300)
    ):
        print(ended.stdout.strip() or f"rank {rank} ended with {ended.returncode}: {ended.stderr}")


if __name__ == "__main__":
    main()
