"""All-reduce by algorithm, beside NCCL's and torch symmetric memory's: mpiexec -n 4 python -m mpi4py all_reduce.py

Sums in place. torch's one-shot can't be in place; it writes to a tensor that is made once. Symmetric memory's buffers
are allocated and registered before, ours and NCCL's are any tensor. How it is measured: side_by_side.py.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import aims
import torch
import torch.distributed as dist
from side_by_side import (
    COLUMNS,
    DTYPES,
    Case,
    Contender,
    Job,
    Timing,
    arguments,
    differing,
    fresh_seed,
    geometric_mean,
    poison,
    random_inputs,
    resolve,
    show,
    symmetric_memory,
)

from proxyccl.channels.collectives.selection import ALGORITHMS, PACKET_ALGORITHMS
from proxyccl.channels.tools.bench_collectives import bus_factor
from proxyccl.channels.tools.options import show_size
from proxyccl.channels.tools.report import Column, Report, Table

_QUICK_SIZES = (1 * aims.KIB, 64 * aims.KIB, 1 * aims.MIB, 16 * aims.MIB)
_LARGEST_BY_PACKETS = 4 * aims.MIB  # beyond, everybody's one-shot algorithms are far from the best
_AUTO = "auto"


class Buffers:
    """One size's tensors: every rank's input, their sum, and where the calls work.

    Args:
        job: the ranks.
        count: elements.
        dtype: their type by name.
        symmetric: a tensor of symmetric memory of at least that size, or None.
    """

    def __init__(self, job: Job, count: int, dtype: str, symmetric: torch.Tensor | None) -> None:
        self.job = job
        self.count = count
        self.x = torch.empty(count, dtype=DTYPES[dtype], device=job.device)
        self.out = torch.empty_like(self.x)
        self.symmetric = symmetric[:count] if symmetric is not None else None
        total = torch.zeros(count, dtype=torch.float32, device=job.device)
        for rank, given in enumerate(random_inputs(job, count, DTYPES[dtype], fresh_seed(job))):
            total += given
            if rank == job.rank:
                self.source = given
        self.expected = total.to(DTYPES[dtype])

    def wrong_after(self, x: torch.Tensor, calls: int) -> int:
        """Wrong elements of a tensor that was reduced in place so many times.

        Each call after the first multiplies by the number of ranks, exactly if that is a power of two. Else only the
        first can be told.
        """
        if calls > 1 and self.job.ranks & (self.job.ranks - 1):
            return 0
        return differing(x, self.expected * float(self.job.ranks) ** (calls - 1))

    def in_place(
        self,
        name: str,
        x: torch.Tensor,
        call: Callable[[], object],
        *,
        ours: bool = False,
        also_wrong: Callable[[], int] = lambda: 0,
    ) -> Contender:
        """A contender that overwrites `x`."""
        return Contender(
            name, ours, call, lambda: x.copy_(self.source), lambda calls: self.wrong_after(x, calls), also_wrong
        )

    def ours(self, name: str) -> Contender:
        """One of our algorithms; its check covers a call out of place into poison too."""
        comm, stream = self.job.comm, self.job.stream.cuda_stream
        algorithm = None if name == _AUTO else name

        def out_of_place() -> int:
            poison(self.out)
            comm.all_reduce(self.source, out=self.out, algorithm=algorithm, stream=stream)
            return differing(self.out, self.expected)

        return self.in_place(
            name,
            self.x,
            lambda: comm.all_reduce(self.x, algorithm=algorithm, stream=stream),
            ours=True,
            also_wrong=out_of_place,
        )

    def peers(self) -> list[Contender]:
        """NCCL, and symmetric memory's algorithms where it is there."""
        found = [self.in_place("NCCL", self.x, lambda: dist.all_reduce(self.x))]
        given = self.symmetric
        if given is None:
            return found
        group = self.job.group_name
        if given.nbytes <= _LARGEST_BY_PACKETS:

            def refill() -> None:
                given.copy_(self.source)
                poison(self.out)

            found.append(
                Contender(
                    "torch one-shot",
                    False,
                    lambda: torch.ops.symm_mem.one_shot_all_reduce_out(given, "sum", group, self.out),
                    refill,
                    lambda _: differing(self.out, self.expected),
                )
            )
        found.append(
            self.in_place("torch two-shot", given, lambda: torch.ops.symm_mem.two_shot_all_reduce_(given, "sum", group))
        )
        return found


def compare(case: Case, timings: list[Timing], ranks: int) -> Report | None:
    """Ours beside the best peer at one size; None if either is missing."""
    mine = [t for t in timings if t.ours and t.time_us]
    peers = [t for t in timings if not t.ours and t.time_us]
    if not mine or not peers:
        return None
    best, peer = (min(group, key=lambda t: t.time_us or math.inf) for group in (mine, peers))
    auto = next((t.time_us for t in mine if t.name == _AUTO), None)
    assert best.time_us is not None
    assert peer.time_us is not None
    return {
        "size": case.nbytes,
        "type": case.dtype,
        "auto_us": auto,
        "ours_us": best.time_us,
        "ours": best.name,
        "peer_us": peer.time_us,
        "peer": peer.name,
        "peer_over_auto": peer.time_us / auto if auto else None,
        "peer_over_ours": peer.time_us / best.time_us,
        "aim_us": aims.all_reduce_us(ranks, case.nbytes),
    }


_SUMMARY = (
    Column("size", "", 8),
    Column("type", "", 8),
    Column("auto", "(µs)", 9, ".2f"),
    Column("ours", "(µs)", 9, ".2f"),
    Column("by", "", 18, left=True),
    Column("peer", "(µs)", 9, ".2f"),
    Column("by", "", 14, left=True),
    Column("peer/auto", "", 9, ".2f"),
    Column("peer/ours", "", 9, ".2f"),
    Column("aim", "(µs)", 8, ".2f"),
)


def summarise(comparisons: list[Report]) -> dict[str, dict[str, float]]:
    """Prints ours beside the best peers. Returns geometric means of the ratios by element type."""
    print("#\n# ours beside the best peer of this run; aim: the best peer's time when the aims were set")
    table = Table(_SUMMARY)
    table.header()
    for row in comparisons:
        table.row(show_size(row["size"]), *list(row.values())[1:])
    means = {}
    for dtype in dict.fromkeys(row["type"] for row in comparisons):
        means[dtype] = {
            ratio: geometric_mean([row[ratio] for row in comparisons if row["type"] == dtype and row[ratio]])
            for ratio in ("peer_over_auto", "peer_over_ours")
        }
        print(
            f"# {dtype}: geometric mean of peer/auto {means[dtype]['peer_over_auto']:.2f}, "
            f"peer/ours {means[dtype]['peer_over_ours']:.2f} (aim {aims.ALL_REDUCE_RATIO})"
        )
    return means


def main() -> int:
    parser = arguments(__doc__.splitlines()[0], aims.ALL_REDUCE_SIZES, _QUICK_SIZES)
    parsed = resolve(parser.parse_args())
    for name in parsed.algorithms or ():
        if name != _AUTO and name not in ALGORITHMS:
            parser.error(f"--algorithms: {name!r} is none of {', '.join((_AUTO, *ALGORITHMS))}")
    rows: list[Report] = []
    comparisons: list[Report] = []
    with Job(parsed.seconds) as job:
        job.heading(
            "all_reduce",
            f"CUDA-graph replays, time a call; median of {parsed.repeats}, maximum over ranks; in place",
        )
        factor = bus_factor("all_reduce", job.ranks)
        wanted = parsed.algorithms or [_AUTO, *job.comm.collectives.algorithms()]
        table = Table(COLUMNS)
        if job.first:
            table.header()
        skipped = []
        for dtype in parsed.dtypes:
            itemsize = DTYPES[dtype].itemsize
            symmetric, reason = symmetric_memory(job, max(parsed.sizes) // itemsize, DTYPES[dtype])
            if reason and job.first:
                print(f"# torch symmetric memory: {reason}")
            for size in parsed.sizes:
                if not job.in_time():
                    skipped.append(f"{show_size(size)} {dtype}")
                    continue
                buffers = Buffers(job, max(1, size // itemsize), dtype, symmetric)
                names = [n for n in wanted if n not in PACKET_ALGORITHMS or size <= _LARGEST_BY_PACKETS]
                timings = job.measure([*map(buffers.ours, names), *buffers.peers()], parsed.repeats)
                case = Case(buffers.count * itemsize, buffers.count, dtype, "sum", factor)
                compared = compare(case, timings, job.ranks)
                if compared is not None:
                    comparisons.append(compared)
                rows += show(job, table, case, timings)
        report: Report = {
            "benchmark": "all_reduce",
            "method": f"CUDA-graph replay, in place, median of {parsed.repeats}, maximum over ranks",
            "comparison": comparisons,
            "geometric_means": summarise(comparisons) if job.first else {},
        }
        return job.finish(parsed, rows, skipped, report)


if __name__ == "__main__":
    sys.exit(main())
