"""Collectives during a matrix product that uses the whole GPU: mpiexec -n 2 python -m mpi4py overlap.py

Each contender is measured in three settings: alone; while matrix products run on another stream as a load; and as the
load while matrix products are timed. The load must outlast the timed work; if the load ends earlier, the measurement is
repeated with twice as much load. All our contenders use registered arrays. Results are checked after every burst that
overlaps with matrix products. A time is the median over repeats of the slowest rank's time. gpu_job.py says how times
are measured.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import aims
import all_reduce
import moves
import numpy as np
from jobs import open_job
from mpi4py import MPI
from program import common_arguments
from side_by_side import PROXIED, Burst, Contender, Job

from proxyccl.tools import options
from proxyccl.tools.options import show_size
from proxyccl.tools.results import Fields
from proxyccl.tools.tables import Column, Table

_DTYPE = "float32"
_SIZES = (64 * aims.KIB, 1 * aims.MIB, 16 * aims.MIB, 256 * aims.MIB)
_QUICK_SIZES = (1 * aims.MIB, 64 * aims.MIB)
_COLLECTIVES = ("all_gather", "all_to_all", "all_reduce")
_ROWS = 8192  # rows of each matrix: enough that a matrix product occupies all multiprocessors
_ROWS_ON_HOST = 256
_PRODUCTS = 4  # Number of matrix products in a burst.
_MOST_BURSTS = 4096  # The maximum number of bursts that are queued as a load.

_COLUMNS = (
    Column("collective", "", 10, left=True),
    Column("size", "", 8),
    Column("algorithm or peer", "", 28, left=True),
    Column("MPs", "used", 5, "d"),
    Column("alone", "(µs)", 10, ".2f"),
    Column("beside", "(µs)", 10, ".2f"),
    Column("beside", "/alone", 8, ".2f"),
    Column("product", "(µs)", 10, ".1f"),
    Column("product", "/alone", 8, ".3f"),
    Column("#wrong", "", 6, "d"),
)


def of_all_reduce(job: Job, largest: int) -> Callable[[int], list[Contender]]:
    """Returns a function that makes the contenders of an all_reduce, given a number of elements up to `largest`."""
    own, peers = job.registered(largest, _DTYPE), job.peers("all_reduce", largest, _DTYPE)

    def contenders(count: int) -> list[Contender]:
        buffers = all_reduce.Buffers(job, count, _DTYPE, own, peers)
        return [*map(buffers.ours, (all_reduce.REGISTERED, PROXIED)), *buffers.peers()]

    return contenders


def of_move(job: Job, collective: str, largest: int) -> Callable[[int], list[Contender]]:
    """Returns a function that makes the contenders of a collective, given a number of elements up to `largest`."""
    buffers = moves.Buffers(job, collective, largest, _DTYPE)
    return lambda count: buffers.contenders(count, list(moves.REGISTERED))


def ratio(time_us: float | None, alone_us: float | None) -> float | None:
    """Returns the ratio of two times, or None if either time is missing."""
    return time_us / alone_us if time_us is not None and alone_us else None


@dataclass
class Figures:
    """The measurements of one contender on this rank: a time in µs for each repeat."""

    contender: Contender
    reason: str
    wrong: int
    burst: Burst | None = None
    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    product_beside: list[float] = field(default_factory=list)


class Together:
    """Measures collectives and matrix products, alone and concurrently. All ranks make the same calls.

    Args:
        job: the ranks.
        product: the burst of matrix products that overlaps with the collectives.
    """

    def __init__(self, job: Job, product: Burst) -> None:
        self._job, self._product = job, product
        self._product_us = job.slowest(job.time_burst(product)[0])
        self.product_alone: list[float] = []

    def _beside(
        self, timed: Burst, other: Burst, bursts: int, before: Callable[[], object] = lambda: None
    ) -> float | None:
        while bursts <= _MOST_BURSTS:
            before()
            time_us, outlasted = self._job.time_burst(timed, beside=other, beside_bursts=bursts)
            if self._job.world.allreduce(outlasted, MPI.LAND):
                return time_us
            bursts *= 2
        return None

    def start(self, contender: Contender) -> Figures:
        """Checks and prepares a contender."""
        wrong, reason = self._job.first_call(contender)
        found = Figures(contender, reason, wrong)
        if not reason:
            found.burst, after = self._job.prepare(contender)
            found.wrong += after
        return found

    def repeat(self, found: list[Figures]) -> None:
        """Measures the matrix products alone, then each contender in all three settings."""
        self.product_alone.append(self._job.time_burst(self._product)[0])
        for each in found:
            burst, contender = each.burst, each.contender
            if burst is None:
                continue
            contender.refill()
            each.alone.append(self._job.time_burst(burst)[0])
            collective_us = self._job.slowest(each.alone[-1]) * burst.calls
            product_us = self._product_us * self._product.calls
            products = 1 + math.ceil(collective_us / product_us)
            beside = self._beside(burst, self._product, products, contender.refill)
            each.wrong += contender.wrong(burst.calls)
            contender.refill()
            collectives = 1 + math.ceil(product_us / collective_us)
            product_beside = self._beside(self._product, burst, collectives)
            if beside is None or product_beside is None:
                each.reason = f"{_MOST_BURSTS} bursts ended before what was timed beside them"
                continue
            each.beside.append(beside)
            each.product_beside.append(product_beside)

    def median(self, times: list[float]) -> float | None:
        """Returns the median over repeats of the slowest rank's time; None without times."""
        slowest = np.array(times)
        self._job.world.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
        return statistics.median(slowest.tolist()) if times else None


def measure(job: Job, product: Burst, contenders: list[Contender], repeats: int) -> list[Fields]:
    """Measures each contender. Returns the table's rows, the same on all ranks."""
    job.synchronize()  # the inputs were made on another stream
    with job.current():
        together = Together(job, product)
        found = [together.start(contender) for contender in contenders]
        for _ in range(repeats):
            together.repeat(found)
    product_us = together.median(together.product_alone)
    rows = []
    for each in found:
        alone, beside, product_beside = map(together.median, (each.alone, each.beside, each.product_beside))
        rows.append(
            {
                "name": each.contender.name,
                "ours": each.contender.ours,
                "multiprocessors": each.burst.multiprocessors if each.burst else None,
                "alone_us": alone,
                "beside_us": beside,
                "beside_over_alone": ratio(beside, alone),
                "product_us": product_us,
                "product_beside_us": product_beside,
                "product_over_alone": ratio(product_beside, product_us),
                "wrong": job.world.allreduce(each.wrong),
                "reason": each.reason,
            }
        )
        if each.burst is not None:
            each.burst.close()
    return rows


def compare(rows: list[Fields]) -> Fields:
    """Returns two ratios for our call by proxy at one size: the call's time during products divided by its time alone,
    and the products' time during this call divided by their time during a call by NCCL's copy engines. A ratio is None
    if a time is missing.
    """
    by_name = {row["name"]: row for row in rows}
    ours, engines = by_name[PROXIED], by_name.get(moves.COPY_ENGINES, {})
    return {
        "collective": ours["collective"],
        "size": ours["size"],
        "beside_over_alone": ours["beside_over_alone"],
        "product_over_copy_engines": ratio(ours["product_beside_us"], engines.get("product_beside_us")),
    }


def summarise(comparisons: list[Fields]) -> None:
    """Prints the worst ratios of our calls by proxy, with their targets."""
    for key, what, aim in (
        ("beside_over_alone", "its time beside products over that alone", aims.BESIDE_RATIO),
        ("product_over_copy_engines", "products beside it over those beside NCCL's copy engines", aims.PRODUCT_RATIO),
    ):
        known = [row for row in comparisons if row[key]]
        if known:
            worst = max(known, key=lambda row: row[key])
            where = f"{worst['collective']} of {show_size(worst['size'])}"
            print(f"# by proxy, {what}, at worst: {worst[key]:.3f}, {where} (aim: at most {aim:g})")


def show(job: Job, table: Table, rows: list[Fields]) -> None:
    """Prints the rows of one collective of one size on the first rank."""
    if not job.first:
        return
    for row in rows:
        table.row(
            row["collective"],
            show_size(row["size"]),
            f"ProxyCCL {row['name']}" if row["ours"] else row["name"],
            *(row[key] for key in ("multiprocessors", "alone_us", "beside_us", "beside_over_alone")),
            *(row[key] for key in ("product_beside_us", "product_over_alone", "wrong")),
        )
        if row["reason"]:
            job.say_once(f"#   {row['name']}: {row['reason']}")


def main() -> int:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("-s", "--sizes", type=options.size, nargs="+", metavar="SIZE", help="bytes, such as 64K")
    parser.add_argument("-c", "--collectives", nargs="+", choices=_COLLECTIVES, default=list(_COLLECTIVES))
    parser.add_argument("-r", "--repeats", type=options.count, help="how often each contender is measured")
    parser.add_argument(
        "--rows", type=options.count, help=f"of the matrices (default {_ROWS}, on the host runtime {_ROWS_ON_HOST})"
    )
    parsed = parser.parse_args()
    sizes = parsed.sizes or (_QUICK_SIZES if parsed.quick else _SIZES)
    repeats = parsed.repeats or (3 if parsed.quick else 9)
    rows: list[Fields] = []
    comparisons: list[Fields] = []
    skipped = []
    with open_job(parsed.seconds) as job:
        on_host = job.comm.runtime.name == "host"
        side = parsed.rows or (_ROWS_ON_HOST if on_host else _ROWS)
        product = job.product(side, _PRODUCTS)
        method = f"{job.timing}; registered arrays, {_DTYPE}; median of {repeats}, maximum over ranks"
        job.heading("overlap", method, f"products of two matrices of {side} x {side}, one after another")
        table = Table(_COLUMNS)
        if job.first:
            table.header()
        itemsize = job.empty(0, _DTYPE).itemsize
        counts = [max(job.ranks, size // itemsize // job.ranks * job.ranks) for size in sizes]
        for collective in parsed.collectives:
            largest = max(counts)
            contenders = (
                of_all_reduce(job, largest) if collective == "all_reduce" else of_move(job, collective, largest)
            )
            for count in counts:
                size = count * itemsize
                if not job.in_time():
                    skipped.append(f"{collective} {show_size(size)}")
                    continue
                found = measure(job, product, contenders(count), repeats)
                of_size = [{"collective": collective, "size": size, "type": _DTYPE, **row} for row in found]
                show(job, table, of_size)
                comparisons.append(compare(of_size))
                rows += of_size
        product.close()
        if job.first:
            summarise(comparisons)
        results: Fields = {
            "benchmark": "overlap",
            "method": method,
            "product_rows": side,
            "comparison": comparisons,
        }
        return job.finish(parsed, rows, skipped, results)


if __name__ == "__main__":
    sys.exit(main())
