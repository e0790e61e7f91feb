"""all_reduce by each algorithm, by NCCL and by torch symmetric memory: mpiexec -n 4 python -m mpi4py all_reduce.py

All calls are in place, except torch's one-shot, which always writes to another tensor. The contenders of torch
symmetric memory, `NCCL, symmetric`, `registered` and `registered_proxy` use registered buffers; the other contenders do
not. `bare copies` shows the link's limit: it only copies the bytes that an all-reduce must send, in both directions
concurrently. gpu_job.py says how times are measured.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import aims
from collectives import bus_factor
from jobs import open_job
from side_by_side import (
    BARE_COPIES,
    COLUMNS,
    PROXIED,
    Case,
    Contender,
    Job,
    Peer,
    Timing,
    absent,
    arguments,
    bare_copies,
    differing,
    fresh_seed,
    geometric_mean,
    random_inputs,
    resolve,
    show,
)

from proxyccl.channels.collectives.selection import ALGORITHMS, PACKET_ALGORITHMS
from proxyccl.tools.options import show_size
from proxyccl.tools.results import Fields
from proxyccl.tools.tables import Column, Table

_QUICK_SIZES = (1 * aims.KIB, 64 * aims.KIB, 1 * aims.MIB, 16 * aims.MIB)
_LARGEST_BY_PACKETS = 4 * aims.MIB  # one-shot algorithms are not measured above this message size
_AUTO = "auto"
REGISTERED = "registered"
_ALGORITHMS: dict[str, str | None] = {_AUTO: None, REGISTERED: None, PROXIED: "proxy"}
"""The algorithm and options of those of our contenders whose names are not algorithms."""


class Buffers:
    """This rank's input for one message size, the expected sum, and the arrays that the calls reduce.

    Args:
        job: the ranks.
        count: number of elements.
        dtype: name of the element type.
        own: registered memory of at least `count` elements.
        peers: the result of `Job.peers`.
    """

    def __init__(self, job: Job, count: int, dtype: str, own: Any, peers: list[Peer]) -> None:
        self.job = job
        self.count = count
        self.x, self.out = job.empty(count, dtype), job.empty(count, dtype)
        self.own = own[:count]
        self._peers = peers
        total: Any = 0
        for rank, given in enumerate(random_inputs(job, count, dtype, fresh_seed(job))):
            total = total + given  # the inputs are small whole numbers, so the sum is exact
            if rank == job.rank:
                self.source = given
        self.expected = total

    def wrong_after(self, x: Any, calls: int) -> int:
        """Returns the number of wrong elements of an array that was reduced in place `calls` times. Each call after the
        first multiplies the elements by the number of ranks. If the number of ranks is not a power of two, the elements
        are rounded, so they are not checked.
        """
        if calls > 1 and self.job.ranks & (self.job.ranks - 1):
            return 0
        return differing(x, self.expected * float(self.job.ranks) ** (calls - 1))

    def in_place(
        self,
        name: str,
        x: Any,
        call: Callable[[], object],
        *,
        ours: bool = False,
        also_wrong: Callable[[], int] = lambda: 0,
    ) -> Contender:
        """Returns a contender that overwrites `x`."""

        def refill() -> None:
            x[:] = self.source

        return Contender(name, ours, call, refill, lambda calls: self.wrong_after(x, calls), also_wrong)

    def ours(self, name: str) -> Contender:
        """Returns the contender for one of our algorithms. The check of this contender also makes an out-of-place call,
        whose output is poisoned first.
        """
        comm, stream = self.job.comm, self.job.handle
        algorithm = _ALGORITHMS.get(name, name)
        symmetric = name in (REGISTERED, PROXIED)
        x = self.own if symmetric else self.x

        def out_of_place() -> int:
            self.job.poison(self.out)
            comm.all_reduce(self.source, out=self.out, algorithm=algorithm, stream=stream)
            self.job.synchronize()
            return differing(self.out, self.expected)

        return self.in_place(
            name,
            x,
            lambda: comm.all_reduce(x, algorithm=algorithm, symmetric=symmetric, stream=stream),
            ours=True,
            also_wrong=out_of_place,
        )

    def peers(self) -> list[Contender]:
        """Returns the other libraries' contenders, but no one-shot of torch at sizes for which one-shot is slow."""
        return [
            self._peer(peer)
            for peer in self._peers
            if peer.name != "torch one-shot" or self.x.nbytes <= _LARGEST_BY_PACKETS
        ]

    def _peer(self, peer: Peer) -> Contender:
        call = peer.call
        if call is None:
            return absent(peer.name, peer.missing)
        source, out = peer.arrays(self.count) if peer.arrays else (self.x, self.x)
        if peer.in_place:
            return self.in_place(peer.name, out, lambda: call(out, out))

        def refill() -> None:
            source[:] = self.source
            self.job.poison(out)

        return Contender(peer.name, False, lambda: call(out, source), refill, lambda _: differing(out, self.expected))


def compare(case: Case, timings: list[Timing], ranks: int) -> Fields | None:
    """Returns our best time and the best time of another library at one size, or None if either time is missing."""
    mine = [t for t in timings if t.ours and t.time_us]
    peers = [t for t in timings if not t.ours and t.time_us and t.name != BARE_COPIES]
    if not mine or not peers:
        return None
    best, peer = (min(group, key=lambda t: t.time_us or math.inf) for group in (mine, peers))
    times = {t.name: t.time_us for t in timings}
    auto, own, proxied, limit = (times.get(name) for name in (_AUTO, REGISTERED, PROXIED, BARE_COPIES))
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
        "registered_us": own,
        "peer_over_registered": peer.time_us / own if own else None,
        "limit_over_registered": limit / own if own and limit else None,
        "registered_proxy_us": proxied,
        "peer_over_registered_proxy": peer.time_us / proxied if proxied else None,
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
    Column("registered", "(µs)", 10, ".2f"),
    Column("peer/reg.", "", 9, ".2f"),
    Column("limit/reg.", "", 10, ".2f"),
    Column("by proxy", "(µs)", 9, ".2f"),
    Column("peer/proxy", "", 10, ".2f"),
    Column("aim", "(µs)", 8, ".2f"),
)


def summarise(comparisons: list[Fields]) -> dict[str, dict[str, float]]:
    """Prints our times and the times of the best other library. Returns, for each element type, the geometric mean of
    the ratios of these times.
    """
    print("#\n# ours beside the best peer of this run; aim: the best peer's time when the aims were set")
    table = Table(_SUMMARY)
    table.header()
    for row in comparisons:
        table.row(show_size(row["size"]), *list(row.values())[1:])
    means = {}
    for dtype in dict.fromkeys(row["type"] for row in comparisons):
        means[dtype] = {
            ratio: geometric_mean([row[ratio] for row in comparisons if row["type"] == dtype and row[ratio]])
            for ratio in ("peer_over_auto", "peer_over_ours", "peer_over_registered")
        }
        print(
            f"# {dtype}: geometric mean of peer/auto {means[dtype]['peer_over_auto']:.2f}, "
            f"peer/ours {means[dtype]['peer_over_ours']:.2f} (aim {aims.ALL_REDUCE_RATIO}), "
            f"peer/registered {means[dtype]['peer_over_registered']:.2f} (aim {aims.REGISTERED_ALL_REDUCE_RATIO})"
        )
    return means


def main() -> int:
    parser = arguments(__doc__.splitlines()[0], aims.ALL_REDUCE_SIZES, _QUICK_SIZES)
    parsed = resolve(parser.parse_args())
    for name in parsed.algorithms or ():
        known = (*_ALGORITHMS, *ALGORITHMS)
        if name not in known:
            parser.error(f"--algorithms: unknown algorithm {name!r}; expected one of {', '.join(known)}")
    rows: list[Fields] = []
    comparisons: list[Fields] = []
    with open_job(parsed.seconds) as job:
        method = f"{job.timing}, in place; median of {parsed.repeats}, maximum over ranks"
        job.heading("all_reduce", method)
        factor = bus_factor("all_reduce", job.ranks)
        wanted = parsed.algorithms or [_AUTO, REGISTERED, PROXIED, *job.comm.collectives.algorithms()]
        table = Table(COLUMNS)
        if job.first:
            table.header()
        skipped = []
        for dtype in job.element_types(parsed.dtypes):
            itemsize = job.empty(0, dtype).itemsize
            largest = max(1, max(parsed.sizes) // itemsize)
            own, peers = job.registered(largest, dtype), job.peers("all_reduce", largest, dtype)
            for size in parsed.sizes:
                if not job.in_time():
                    skipped.append(f"{show_size(size)} {dtype}")
                    continue
                buffers = Buffers(job, max(1, size // itemsize), dtype, own, peers)
                names = [n for n in wanted if n not in PACKET_ALGORITHMS or size <= _LARGEST_BY_PACKETS]
                limit = bare_copies(job, buffers.x.nbytes)
                timings = job.measure([*map(buffers.ours, names), *buffers.peers(), limit], parsed.repeats)
                case = Case(buffers.count * itemsize, buffers.count, dtype, "sum", factor)
                compared = compare(case, timings, job.ranks)
                if compared is not None:
                    comparisons.append(compared)
                rows += show(job, table, case, timings)
        results: Fields = {
            "benchmark": "all_reduce",
            "method": method,
            "comparison": comparisons,
            "geometric_means": summarise(comparisons) if job.first else {},
        }
        return job.finish(parsed, rows, skipped, results)


if __name__ == "__main__":
    sys.exit(main())
