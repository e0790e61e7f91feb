"""Runs the campaign's work for hours without a fault, and measures whether resources or times drift: python
tests/support/faults/endurance.py --minutes 60

PROXYCCL_RUNTIME names the runtime. Each rank uses its own GPU. Ten times during the run, every rank measures its
resident memory, descriptors, threads, the CPU time of a step, on CUDA the device memory in use, and the time of a small
all_reduce by kernels and by the proxy. Other work on the machine also changes the times. So the table has the minimum
and the 10th percentile beside the median, and each measurement alternates between the communicator of the whole run
and a new one. If both communicators become slower, the machine was busy; if only the communicator
of the whole run becomes slower, times drift.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np

from proxyccl import Communicator, FileBootstrap
from support.faults.work import Work
from support.processes import run_processes

_MEASUREMENTS = 10
_BURSTS, _CALLS = 20, 50
_STEPS = 10
_SEED = 11
_MEASURING_SECONDS = 1800
"""The time allowed for all measurements: on a busy machine a call takes milliseconds."""


def resident_bytes() -> int:
    """Returns the number of bytes of this process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def device_bytes(comm: Communicator) -> int:
    """Returns the number of bytes in use on the rank's NVIDIA GPU, by any process."""
    comm.synchronize()  # unreferenced arrays are freed only by a synchronisation
    free, total = comm.runtime.memory_left()
    return total - free


def communicator(meeting: str) -> Communicator:
    """Returns a new communicator of all ranks, bootstrapped through the directory `meeting`."""
    directory = Path(os.environ["RENDEZVOUS"], meeting)
    return Communicator(FileBootstrap(directory, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])))


def burst(comm: Communicator, algorithm: str | None) -> list[float]:
    """Makes small all_reduces. Returns the durations in us of all but the first, each until the result is available."""
    x, times = comm.empty(64, "float32").fill(1), []
    queued = comm.runtime.name != "host"  # a GPU's call returns before its result is available
    for _ in range(_CALLS + 1):
        began = time.perf_counter()
        comm.all_reduce(x, algorithm=algorithm)
        if queued:
            comm.synchronize()
        times.append(1e6 * (time.perf_counter() - began))
    return times[1:]


def latencies(communicators: dict[str, Communicator]) -> dict[str, dict[str, float]]:
    """Returns the minimum, 10th percentile and median time of each communicator's calls, in us."""
    found = {}
    for algorithm in (None, "proxy"):
        times: dict[str, list[float]] = {name: [] for name in communicators}
        for _ in range(_BURSTS):
            for name, comm in communicators.items():
                times[name] += burst(comm, algorithm)
        for name, values in times.items():
            least, low, median = np.percentile(values, [0, 10, 50]).round(1).tolist()
            found[f"by {algorithm or 'kernels'}, {name}"] = {"least": least, "10 %": low, "median": median}
    return found


class Endurance:
    """One rank's work and measurements.

    Args:
        seconds: how long the rank works.
        rest: seconds of sleep after every few steps.
    """

    def __init__(self, seconds: float, rest: float) -> None:
        self._seconds, self._rest = seconds, rest
        self._comm = communicator("all")
        self._work = Work(self._comm, _SEED)
        self._began = time.monotonic()
        self._measurements: list[dict[str, Any]] = []

    def run(self) -> list[dict[str, Any]]:
        """Works for the given time. Returns the measurements."""
        while len(self._measurements) < _MEASUREMENTS:
            steps = 0
            before = time.process_time()
            moment = self._seconds * (len(self._measurements) + 1) / _MEASUREMENTS
            while not self._work.agree(time.monotonic() - self._began > moment):
                for _ in range(_STEPS):
                    self._work.step()
                steps += _STEPS
                time.sleep(self._rest)
            used = time.process_time() - before
            self._measurements.append(self._measure(steps, used))
        self._work.close()
        self._comm.close()
        return self._measurements

    def _measure(self, steps: int, used: float) -> dict[str, Any]:
        gc.collect()
        found = {
            "minute": round((time.monotonic() - self._began) / 60, 1),
            "memory, MB": round(resident_bytes() / 1e6, 1),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            "steps": steps,
            "CPU of a step, ms": round(1e3 * used / max(1, steps), 2),
        }
        if self._comm.runtime.name == "cuda":
            found["device memory, MB"] = round(device_bytes(self._comm) / 1e6, 1)
        with communicator(f"anew-{len(self._measurements)}") as anew:
            return found | latencies({"old": self._comm, "new": anew})


def show(measurements: list[dict[str, Any]]) -> None:
    """Prints a rank's measurements as a table with a line for each quantity."""
    for name, first in measurements[0].items():
        for part in first if isinstance(first, dict) else (None,):
            values = [each[name] if part is None else each[name][part] for each in measurements]
            label = name if part is None else f"{name}, us, {part}"
            print(f"{label:32}", *(f"{value:>8}" for value in values))


def main() -> int:
    """Starts the ranks; with RANK in the environment, runs as that rank. Returns 1 if a rank failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="how long the ranks work")
    parser.add_argument("--ranks", type=int, default=3, help="how many there are")
    parser.add_argument("--rest", type=float, default=0, help="seconds that they sleep after every few steps")
    arguments = parser.parse_args()
    if "RENDEZVOUS" in os.environ:
        np.seterr(all="raise")
        print(json.dumps(Endurance(60 * arguments.minutes, arguments.rest).run()))
        return 0
    given = ("--minutes", str(arguments.minutes), "--rest", str(arguments.rest))
    ended = run_processes(arguments.ranks, Path(__file__), *given, timeout=60 * arguments.minutes + _MEASURING_SECONDS)
    for rank, process in enumerate(ended):
        print(f"rank {rank} of {arguments.ranks}")
        if process.returncode:
            print(f"ended with {process.returncode}: {process.stderr}")
        else:
            show(json.loads(process.stdout))
    return int(any(process.returncode for process in ended))


if __name__ == "__main__":
    sys.exit(main())
