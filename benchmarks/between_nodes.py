"""Collectives and expert parallelism between rehearsed nodes: mpiexec -n 4 python -m mpi4py between_nodes.py

Rehearsed nodes are groups of ranks on one machine that communicate as if they were on different hosts. Between these
nodes, ProxyCCL stages data in pinned memory and sends it through libfabric over the loopback's TCP, and NCCL uses its
socket transport. On the host runtime ProxyCCL is compared with gloo. The program also measures TCP's rate by the number
of streams, and the rate of copies to and from pinned memory. all_reduce.py and moves.py define the meaning of sizes.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from typing import Any

import aims
import all_reduce
import moves
from collectives import bus_factor
from jobs import open_job
from network_limits import limits
from side_by_side import COLUMNS, Case, Contender, Job, Timing, arguments, resolve, show

from proxyccl import EPAll2AllLayer
from proxyccl.tools import options
from proxyccl.tools.options import show_size
from proxyccl.tools.results import Fields
from proxyccl.tools.tables import Column, Table

_SIZES = tuple(aims.KIB << shift for shift in (0, 4, 6, 8, 10, 12, 14, 16, 18))
_QUICK_SIZES = (1 * aims.KIB, 64 * aims.KIB, 16 * aims.MIB)
_LONG = 16 * aims.MIB
_LONG_REPEATS = 4  # number of repeats of a long call
_REDUCTIONS = (all_reduce.REGISTERED, "auto")
_MOVES = ("registered_proxy", "auto")
_HIDDEN, _TOPK, _EXPERTS, _BLOCKS = 7168, 8, 256, 24
_TOKENS, _QUICK_TOKENS = (128, 4096), (128,)
_EXPERTS_CALLS = "experts"


class Reductions:
    """Makes the contenders of an all_reduce of any size, all on the same memory."""

    def __init__(self, job: Job, count: int, dtype: str, names: list[str] | None) -> None:
        self._job, self._dtype, self._names = job, dtype, names or list(_REDUCTIONS)
        self._own, self._peers = job.registered(count, dtype), job.peers("all_reduce", count, dtype)

    def contenders(self, count: int) -> list[Contender]:
        """Returns our contenders, then those of NCCL or gloo."""
        buffers = all_reduce.Buffers(self._job, count, self._dtype, self._own, self._peers)
        return [*map(buffers.ours, self._names), *buffers.peers()]


class Moves:
    """Makes the contenders of an all_gather or all_to_all of any size, all on the same memory."""

    def __init__(self, job: Job, collective: str, count: int, dtype: str) -> None:
        self._buffers = moves.Buffers(job, collective, count, dtype)

    def contenders(self, count: int) -> list[Contender]:
        """Returns our contenders, then those of NCCL or gloo."""
        return self._buffers.contenders(count, list(_MOVES))


def experts(job: Job, table: Table, dtype: str, tokens: int, repeats: int) -> list[Fields]:
    """Measures dispatch and combine in the layout "rank", and the all_to_all of NCCL or gloo that moves the same bytes.
    Returns their rows.
    """
    import expert_parallel  # imported here, because the module needs torch

    if job.comm.runtime.name == "host":
        from torch_peer import join_gloo

        join_gloo(job.world)
    routing = expert_parallel.Routing.random(job, tokens, _HIDDEN, _TOPK, _EXPERTS, dtype)
    layers = {
        name: EPAll2AllLayer(
            job.comm,
            tokens,
            _HIDDEN,
            _TOPK,
            job.rank,
            _EXPERTS,
            job.comm.local_world_size,
            job.ranks,
            dtype=routing.tokens.dtype if job.comm.runtime.name != "host" else dtype,
            num_sm=_BLOCKS,
            max_recv_tokens=routing.most_rows[layout],
            layout=layout,
        )
        for name, layout in (("a row an expert", "expert"), ("a row a rank", "rank"))
    }
    peer = "gloo" if job.comm.runtime.name == "host" else "NCCL"
    timings = job.measure(expert_parallel.contenders(job, routing, layers, peer), repeats)
    nbytes = job.world.allreduce(sum(routing.crossing)) // job.ranks * _HIDDEN * routing.tokens.element_size()
    rows = show(job, table, Case(nbytes, tokens, dtype, None, 1.0), timings)
    for layer in layers.values():
        layer.finalize()
    return rows


def compare(collective: str, case: Case, timings: list[Timing]) -> Fields | None:
    """Returns our best time and the time of NCCL or gloo at one size, or None if either time is missing."""
    mine = [t for t in timings if t.ours and t.time_us]
    peers = [t for t in timings if not t.ours and t.time_us]
    if not mine or not peers:
        return None
    best, peer = (min(group, key=lambda t: t.time_us or math.inf) for group in (mine, peers))
    assert best.time_us is not None
    assert peer.time_us is not None
    return {
        "collective": collective,
        "size": case.nbytes,
        "ours_us": best.time_us,
        "ours": best.name,
        "peer_us": peer.time_us,
        "peer": peer.name,
        "peer_over_ours": peer.time_us / best.time_us,
    }


_SUMMARY = (
    Column("collective", "", 12, left=True),
    Column("size", "", 8),
    Column("ours", "(µs)", 10, ".1f"),
    Column("by", "", 18, left=True),
    Column("peer", "(µs)", 10, ".1f"),
    Column("by", "", 8, left=True),
    Column("peer/ours", "", 9, ".2f"),
)


def summarise(comparisons: list[Fields]) -> None:
    """Prints our times beside the times of NCCL or gloo."""
    print("#")
    table = Table(_SUMMARY)
    table.header()
    for row in comparisons:
        table.row(row["collective"], show_size(row["size"]), *list(row.values())[2:])


def _say(found: Fields) -> None:
    for row in found["tcp"]:
        print(
            f"# TCP, {row['streams']} streams: {row['one_way_gbs']:.2f} GB/s one way, "
            f"{row['each_of_both_ways_gbs']:.2f} GB/s each way at once"
        )
    print(f"# TCP, 64 bytes one way: {found['tcp_short_us']:.1f} µs")
    copies = ", ".join(f"{way} {found[f'bus_{way}_gbs']:.2f}" for way in ("to_host", "to_device", "both"))
    print(f"# copies with pinned memory, GB/s: {copies}", flush=True)


def main() -> int:
    parser = arguments(__doc__.splitlines()[0], _SIZES, _QUICK_SIZES)
    parser.add_argument("--nodes", type=options.count, default=2, help="rehearsed nodes (default %(default)s)")
    calls = ("all_reduce", "all_gather", "all_to_all", _EXPERTS_CALLS)
    parser.add_argument("-c", "--calls", nargs="+", choices=calls, default=list(calls))
    parsed = resolve(parser.parse_args())
    dtype = parsed.dtypes[0]
    rows: list[Fields] = []
    comparisons: list[Fields] = []
    skipped: list[str] = []
    with open_job(parsed.seconds, nodes=parsed.nodes) as job:
        method = f"{job.timing}; median of {parsed.repeats}, of long calls {_LONG_REPEATS}, maximum over ranks"
        job.heading(f"between {parsed.nodes} rehearsed nodes", method)
        found = limits(job)
        table = Table(COLUMNS)
        if job.first:
            _say(found)
            table.header()
        for call in parsed.calls:
            if call == _EXPERTS_CALLS:
                if importlib.util.find_spec("torch") is None:
                    skipped.append(f"{call}, which need torch")
                    continue
                for tokens in _QUICK_TOKENS if parsed.quick else _TOKENS:
                    if job.in_time():
                        found_rows = experts(job, table, dtype, tokens, parsed.repeats)
                        rows += [{"call": call, **row} for row in found_rows]
                    else:
                        skipped.append(f"{call}, {tokens} tokens")
                continue
            itemsize = job.empty(0, dtype).itemsize
            counts = [max(job.ranks, size // itemsize // job.ranks * job.ranks) for size in parsed.sizes]
            made: Any = (
                Reductions(job, max(counts), dtype, parsed.algorithms)
                if call == "all_reduce"
                else Moves(job, call, max(counts), dtype)
            )
            for count in counts:
                case = Case(count * itemsize, count, dtype, None, bus_factor(call, job.ranks))
                if not job.in_time():
                    skipped.append(f"{call}, {show_size(case.nbytes)}")
                    continue
                repeats = parsed.repeats if case.nbytes < _LONG else min(parsed.repeats, _LONG_REPEATS)
                timings = job.measure(made.contenders(count), repeats)
                compared = compare(call, case, timings)
                if compared is not None:
                    comparisons.append(compared)
                rows += [{"call": call, **row} for row in show(job, table, case, timings)]
        if job.first:
            summarise(comparisons)
        results: Fields = {
            "benchmark": "between_nodes",
            "nodes": parsed.nodes,
            "method": method,
            "limits": found,
            "comparison": comparisons,
        }
        return job.finish(parsed, rows, skipped, results)


if __name__ == "__main__":
    sys.exit(main())
