"""Compares the collectives that only move bytes, all_gather and all_to_all, with NCCL's kernels and copy engines.

NCCL has separate kernels for arrays that are registered as symmetric; NCCL's time is the time of its faster kernels. A
size is the number of bytes of one rank's output for all_gather, or of one rank's input for all_to_all. An all_gather is
in place: each rank's input is its share of the output. An all_to_all is out of place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import aims
from collectives import bus_factor
from jobs import open_job
from side_by_side import (
    COLUMNS,
    PROXIED,
    Case,
    Contender,
    Job,
    Peer,
    Timing,
    absent,
    arguments,
    differing,
    fresh_seed,
    geometric_mean,
    random_inputs,
    resolve,
    show,
)

from proxyccl.tools.options import show_size
from proxyccl.tools.results import Fields
from proxyccl.tools.tables import Table

COPY_ENGINES = "NCCL, copy engines"
_NCCL_KERNELS = ("NCCL", "NCCL, symmetric")
REGISTERED = {"registered_kernels": "kernels", PROXIED: "proxy"}
"""Our names of calls with registered arrays, and the algorithm of each."""
_ALGORITHMS = {"auto": None, "proxy": "proxy", **REGISTERED}
_QUICK_SIZES = (4 * aims.KIB, 1 * aims.MIB, 64 * aims.MIB)


class Buffers:
    """Input and output arrays of the largest size, with one element type. Calls of smaller sizes use the beginning of
    the arrays.

    Args:
        job: the ranks.
        collective: "all_gather" or "all_to_all".
        count: elements of the largest size.
        dtype: name of the element type.
    """

    def __init__(self, job: Job, collective: str, count: int, dtype: str) -> None:
        self.job, self.collective, self.dtype = job, collective, dtype
        self.ordinary = job.empty(count, dtype), job.empty(count, dtype)
        self.registered = job.registered(count, dtype), job.registered(count, dtype)
        self.peers = job.peers(collective, count, dtype)

    def contenders(self, count: int, names: list[str]) -> list[Contender]:
        """Returns our contenders of these names, then the other libraries' contenders, for a call of `count` elements
        with new random inputs.
        """
        size = _OneSize(self.job, self.collective, count, self.dtype)
        return [*(self._ours(size, name) for name in names), *(self._peer(size, peer) for peer in self.peers)]

    def _ours(self, size: _OneSize, name: str) -> Contender:
        call, algorithm = getattr(self.job.comm, self.collective), _ALGORITHMS[name]
        source, out = self.registered if name in REGISTERED else self.ordinary
        return size.contender(
            name,
            source,
            out,
            lambda out, x: call(x, out=out, algorithm=algorithm, stream=self.job.handle),
            ours=True,
        )

    def _peer(self, size: _OneSize, peer: Peer) -> Contender:
        if peer.call is None:
            return absent(peer.name, peer.missing)
        source, out = peer.arrays(size.count) if peer.arrays else self.ordinary
        return size.contender(peer.name, source, out, peer.call)


class _OneSize:
    def __init__(self, job: Job, collective: str, count: int, dtype: str) -> None:
        self._job, self.count = job, count
        self._gathers = collective == "all_gather"
        share = count // job.ranks
        self._mine = slice(job.rank * share, (job.rank + 1) * share)
        self._expected = job.empty(count, dtype)
        for rank, given in enumerate(random_inputs(job, count, dtype, fresh_seed(job))):
            its = slice(rank * share, (rank + 1) * share)
            self._expected[its] = given[its if self._gathers else self._mine]
            if rank == job.rank:
                self._given = given

    def contender(
        self, name: str, source: Any, out: Any, call: Callable[[Any, Any], object], *, ours: bool = False
    ) -> Contender:
        out = out[: self.count]
        x = out[self._mine] if self._gathers else source[: self.count]

        def refill() -> None:
            self._job.poison(out)
            x[:] = self._given[self._mine] if self._gathers else self._given

        return Contender(name, ours, lambda: call(out, x), refill, lambda _: differing(out, self._expected))


def _fastest_kernels(times: Mapping[str, float | None]) -> float | None:
    return min((time for name in _NCCL_KERNELS if (time := times.get(name))), default=None)


def compare(case: Case, timings: list[Timing]) -> Fields:
    """Returns, for one size, NCCL's times divided by our times with registered arrays; None for a ratio without both
    times.
    """
    times = {timing.name: timing.time_us for timing in timings}
    nccl, engines = _fastest_kernels(times), times.get(COPY_ENGINES)
    kernels, proxied = (times.get(name) for name in REGISTERED)
    return {
        "size": case.nbytes,
        "type": case.dtype,
        "nccl_over_kernels": nccl / kernels if nccl and kernels else None,
        "nccl_over_proxy": nccl / proxied if nccl and proxied else None,
        "copy_engines_over_proxy": engines / proxied if engines and proxied else None,
    }


def summarise(comparisons: list[Fields], ratios: dict[str, list[float]]) -> Fields:
    """Prints the ratios that have a target. Returns, for each element type, the geometric mean over sizes of NCCL's
    time divided by our best time.
    """
    means = {dtype: geometric_mean(values) for dtype, values in ratios.items()}
    for dtype in dict.fromkeys(row["type"] for row in comparisons):
        rows = [row for row in comparisons if row["type"] == dtype]
        if dtype in means:
            print(f"# {dtype}: geometric mean of NCCL's time over the best of ours: {means[dtype]:.2f}")
        kernels = [row["nccl_over_kernels"] for row in rows if row["nccl_over_kernels"]]
        if kernels:
            print(
                f"# {dtype}: NCCL's time over registered_kernels': geometric mean {geometric_mean(kernels):.2f} "
                f"(aim for all_to_all {aims.MOVED_BY_KERNELS_RATIO:g}), least {min(kernels):.2f} (aim 1)"
            )
        engines = [
            row["copy_engines_over_proxy"]
            for row in rows
            if row["size"] >= aims.COPY_ENGINES_BYTES and row["copy_engines_over_proxy"]
        ]
        if engines:
            print(
                f"# {dtype}: time of NCCL's copy engines over {PROXIED}'s from "
                f"{show_size(aims.COPY_ENGINES_BYTES)} on: {min(engines):.2f} at least "
                f"(aim {aims.COPY_ENGINES_RATIO:g})"
            )
    return means


def measure(collective: str, description: str) -> int:
    """Runs the program for one collective: parses options, prints the table and writes results. Returns the
    exit code.
    """
    parser = arguments(description, aims.ALL_REDUCE_SIZES, _QUICK_SIZES)
    parsed = resolve(parser.parse_args())
    names = parsed.algorithms or list(_ALGORITHMS)
    for name in names:
        if name not in _ALGORITHMS:
            parser.error(f"--algorithms: unknown algorithm {name!r}; expected one of {', '.join(_ALGORITHMS)}")
    rows: list[Fields] = []
    comparisons: list[Fields] = []
    ratios: dict[str, list[float]] = {}
    skipped = []
    with open_job(parsed.seconds) as job:
        place = "in place" if collective == "all_gather" else "out of place"
        method = f"{job.timing}, {place}; median of {parsed.repeats}, maximum over ranks"
        job.heading(collective, method)
        table = Table(COLUMNS)
        if job.first:
            table.header()
        for dtype in job.element_types(parsed.dtypes):
            itemsize = job.empty(0, dtype).itemsize
            counts = [max(job.ranks, size // itemsize // job.ranks * job.ranks) for size in parsed.sizes]
            buffers = Buffers(job, collective, max(counts), dtype)
            for count in counts:
                if not job.in_time():
                    skipped.append(f"{show_size(count * itemsize)} {dtype}")
                    continue
                timings = job.measure(buffers.contenders(count, names), parsed.repeats)
                case = Case(count * itemsize, count, dtype, None, bus_factor(collective, job.ranks))
                comparisons.append(compare(case, timings))
                times = {timing.name: timing.time_us for timing in timings if timing.time_us}
                ours = [times[name] for name in names if name in times]
                nccl = _fastest_kernels(times)
                if ours and nccl:
                    ratios.setdefault(dtype, []).append(nccl / min(ours))
                rows += show(job, table, case, timings)
        results: Fields = {
            "benchmark": collective,
            "method": method,
            "comparison": comparisons,
            "geometric_means": summarise(comparisons, ratios) if job.first else {},
        }
        return job.finish(parsed, rows, skipped, results)
