"""Proxies in a separate process compared with proxies in threads: mpiexec -n 2 python -m mpi4py proxy_place.py

Several times, the program opens a communicator with a proxy process and one with proxy threads. Latencies and rates are
measured as in daemon.py, between the first two ranks. The cost to issue is the wall-clock time that the slowest rank's
thread needs to issue one proxied all_reduce of 1 KiB. Calls are issued in bursts, each on an empty stream. The time to
start is the slowest rank's time of the first use of a proxy, immediately after the communicator was made. The time to
start includes the start of the proxy's thread, or of the proxy's process with its device contexts.
"""

from __future__ import annotations

import statistics
import sys
import time

import aims
from daemon import of_two, quiet_barrier
from mpi4py import MPI
from program import common_arguments, describe, end_if_it_hangs, heading

from proxyccl import Communicator
from proxyccl.tools.results import Fields, write_json
from proxyccl.tools.tables import Column, Table

_TIMEOUT = 20.0  # seconds
_WHERE = ("thread", "process")
_COUNT = 256  # number of elements, of 4 bytes each
_BURST = 50
_BURSTS = 40
_GONE_SECONDS = 1.5  # seconds after which an unused proxy process has ended

Samples = dict[str, dict[str, list[float]]]
"""The measurements, by name and by where the proxies ran."""


def slowest(seconds: float, scale: float) -> float:
    """Returns the maximum of all ranks' times in seconds, multiplied by `scale`."""
    return float(MPI.COMM_WORLD.allreduce(seconds * scale, MPI.MAX))


def of_all(where: str) -> dict[str, float]:
    """Measures the time to start in ms and the cost to issue in µs, with proxies in threads or in a process."""
    quiet_barrier()
    time.sleep(_GONE_SECONDS)
    with Communicator.from_mpi(timeout=_TIMEOUT, proxy=where) as comm:
        quiet_barrier()
        start = time.perf_counter()
        comm.proxy  # noqa: B018  the first use starts the proxy
        started = slowest(time.perf_counter() - start, 1e3)
        array, stream = comm.empty(_COUNT, "float32").fill(0), comm.runtime.create_stream()
        bursts = []
        for burst in range(_BURSTS + 2):
            quiet_barrier()
            start = time.perf_counter()
            for _ in range(_BURST):
                comm.all_reduce(array, algorithm="proxy", stream=stream)
            issued = slowest(time.perf_counter() - start, 1e6 / _BURST)
            stream.synchronize()
            comm.check()
            if burst >= 2:  # the first two bursts are warm-ups
                bursts.append(issued)
    return {"start": started, "issue": statistics.median(bursts)}


def ratios(samples: Samples, *, higher_is_better: bool) -> list[Fields]:
    """Returns a row for each measurement: the medians with threads and with the process, and their ratio."""
    rows = []
    for name, values in samples.items():
        thread, process = (statistics.median(values[where]) for where in _WHERE)
        aim = aims.DAEMON_RATE_RATIO if higher_is_better else aims.DAEMON_LATENCY_RATIO
        rows.append({"what": name, "thread": thread, "process": process, "ratio": process / thread, "aim": aim})
    return rows


def show(title: str, unit: str, rows: list[Fields], scale: float) -> None:
    """Prints one table."""
    print(f"\n{title}")
    table = Table(
        (
            Column("", "", 28, left=True),
            Column("thread", unit, 10, ".2f"),
            Column("process", unit, 10, ".2f"),
            Column("ratio", "", 8, ".2f"),
        )
    )
    table.header()
    for row in rows:
        table.row(row["what"], row["thread"] * scale, row["process"] * scale, row["ratio"])


def main() -> int:
    parser = common_arguments(__doc__.splitlines()[0])
    parsed = parser.parse_args()
    end_if_it_hangs(parsed.seconds)
    world = MPI.COMM_WORLD
    if world.size < 2:
        raise SystemExit("proxy_place.py needs at least 2 ranks: mpiexec -n 2 python -m mpi4py …")
    with Communicator.from_mpi(timeout=_TIMEOUT, proxy="thread") as comm:
        heading(comm, "proxies in a process of the job's own, beside proxies in the ranks")
        facts = describe(comm)
    samples: tuple[Samples, ...] = ({}, {}, {}, {})
    latency, rate, start, issue = samples
    for repeat in range(2 if parsed.quick else 5):
        for where in _WHERE if repeat % 2 == 0 else reversed(_WHERE):
            for into, found in zip((latency, rate), of_two(where), strict=True):
                for name, values in found.items():
                    into.setdefault(name, {}).setdefault(where, []).extend(values)
            cost = of_all(where)
            start.setdefault("the first use", {}).setdefault(where, []).append(cost["start"])
            issue.setdefault("all_reduce of 1 KiB", {}).setdefault(where, []).append(cost["issue"])
    if world.rank == 0:
        results = {
            "benchmark": "proxy_place",
            **facts,
            "latency_us": ratios(latency, higher_is_better=False),
            "triggers_per_s": ratios(rate, higher_is_better=True),
            "issue_us": ratios(issue, higher_is_better=False),
            "start_ms": ratios(start, higher_is_better=False),
        }
        show("Latency, one way", "(µs)", results["latency_us"], 1)
        show("Rate of one ring", "(M/s)", results["triggers_per_s"], 1e-6)
        show("Cost to issue", "(µs)", results["issue_us"], 1)
        show("Time to start", "(ms)", results["start_ms"], 1)
        if parsed.json is not None:
            write_json(parsed.json, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
