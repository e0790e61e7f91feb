"""Execution plans compared with our all_reduce: mpiexec -n 2 python -m mpi4py benchmarks/execution_plans.py

The contenders reduce from one registered array to another:

- two_shot, the shipped kernel;
- a plan in which each rank writes each share of its input to the scratch memory of the share's owner; the owner sums
  and writes the result to all outputs;
- a plan in which each rank reads its own share from all inputs, and writes the sums to all outputs;
- up to 4 MiB, a plan in which each rank sends shares to their owners and gets the sums back as packets.

A plan has as many threadblocks as two_shot has blocks. gpu_job.py says how times are measured.
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
    COLUMNS,
    Case,
    Contender,
    Job,
    Timing,
    arguments,
    differing,
    fresh_seed,
    random_inputs,
    resolve,
    show,
)

from proxyccl import ExecutionPlan, RegisteredMemory
from proxyccl.tools.options import show_size
from proxyccl.tools.results import Fields
from proxyccl.tools.tables import Column, Table

_SIZES = tuple(aims.KIB << shift for shift in (6, 8, 10, 12, 14, 16, 18))
_QUICK_SIZES = (64 * aims.KIB, 1 * aims.MIB, 64 * aims.MIB)
_HOST_SIZES = (4 * aims.KIB, 256 * aims.KIB)
_LONGEST_PACKETS = 4 * aims.MIB
_MOST_THREADBLOCKS = 128  # all threadblocks must be resident on the GPU at the same time
_TWO_SHOT = "two_shot"

Block = list[dict[str, Any]]


def plan(
    ranks: int, name: str, blocks: Callable[[int, list[int]], list[Block]], scratch: int, *, channels: int = 1
) -> ExecutionPlan:
    """Builds an execution plan of all_reduce. `blocks` takes a rank and its peers, and returns the operations of each
    threadblock.

    There are `channels` channels between two ranks; threadblock i uses the channel i % `channels`.
    """
    gpus = []
    for rank in range(ranks):
        peers = [peer for peer in range(ranks) if peer != rank]
        count = len(peers)
        refs = [{"access_channel_type": "memory", "remote_buffer_ids": list(range(3 * count))}]
        threadblocks = []
        for i, ops in enumerate(blocks(rank, peers)):
            ids = [number * channels + i % channels for number in range(count)]
            used = [{"channel_type": "memory", "channel_ids": ids}]
            threadblocks.append({"id": i, "ops": ops, "channels": used, "remote_buffer_refs": refs})
        gpus.append(
            {
                "id": rank,
                "input_chunks": ranks,
                "output_chunks": ranks,
                "scratch_chunks": scratch,
                "threadblocks": threadblocks,
                "channels": [
                    {"channel_type": "memory", "connected_to": [peer for peer in peers for _ in range(channels)]}
                ],
                "remote_buffers": [
                    {"rank": peer, "type": kind, "access_channel_types": ["memory"]} for kind in "ios" for peer in peers
                ],
            }
        )
    packets = any(op["name"] == "ppkt" for gpu in gpus for block in gpu["threadblocks"] for op in block["ops"])
    return ExecutionPlan.load(
        {
            "name": name,
            "collective": "allreduce",
            "protocol": "LL" if packets else "Simple",
            "use_double_scratch_buffer": packets,
            "inplace": False,
            "num_threads_per_block": 512,
            "gpus": gpus,
        }
    )


def remote(peers: list[int], peer: int, kind: str, index: int) -> dict[str, int]:
    """Returns a reference to a chunk of a peer's buffer."""
    return {"buffer_id": "ios".index(kind) * len(peers) + peers.index(peer), "index": index, "size": 1}


def own(kind: str, index: int) -> dict[str, Any]:
    """Returns a reference to a chunk of the rank's own buffer."""
    return {"type": kind, "index": index, "size": 1}


def meeting(peers: list[int], order: str = "") -> Block:
    """Returns the operations of a barrier among the threadblocks that have the same number on all ranks. After the
    barrier, each threadblock sees the data that the other threadblocks wrote before the barrier; with the order "rlx",
    it sees only data that earlier kernels wrote.
    """
    channels = {"channel_ids": list(range(len(peers))), "channel_type": "memory"}
    return [{"name": f"{order}signal", **channels}, {"name": f"{order}wait", **channels}]


def writes(ranks: int, count: int) -> ExecutionPlan:
    """Builds a plan with `count` threadblocks, which wait only for threadblocks of the same number on other ranks."""

    def blocks(rank: int, peers: list[int]) -> list[Block]:
        found: list[Block] = []
        for part in range(count):
            split = {"channel_type": "memory", "tbg_info": {"tb_id": part, "tbg_size": count}}
            puts = [
                {"name": "put", "src_buff": [own("i", peer)], "dst_buff": [remote(peers, peer, "s", rank)], **split}
                for peer in peers
            ]
            reduce = {
                "name": "res",
                "src_buff": [own("i", rank), *(own("s", peer) for peer in peers)],
                "dst_buff": [own("o", rank), *(remote(peers, peer, "o", rank) for peer in peers)],
                **split,
            }
            found.append([*puts, *meeting(peers), reduce, *meeting(peers)])
        return found

    return plan(ranks, f"writes, {count} threadblocks", blocks, ranks, channels=count)


def reads_and_writes(ranks: int, count: int) -> ExecutionPlan:
    """Builds a plan with `count` threadblocks, which wait only for threadblocks of the same number on other ranks."""

    def blocks(rank: int, peers: list[int]) -> list[Block]:
        reduce = {
            "name": "rres",
            "src_buff": [own("i", rank), *(remote(peers, peer, "i", rank) for peer in peers)],
            "dst_buff": [own("o", rank), *(remote(peers, peer, "o", rank) for peer in peers)],
            "channel_type": "memory",
        }
        begin, end = meeting(peers, "rlx"), meeting(peers)
        return [[*begin, {**reduce, "tbg_info": {"tb_id": part, "tbg_size": count}}, *end] for part in range(count)]

    return plan(ranks, f"reads and writes, {count} threadblocks", blocks, 0, channels=count)


def by_packets(ranks: int, count: int) -> ExecutionPlan:
    """Builds a plan in which `count` threadblocks send each chunk, and `count` other threadblocks reduce the received
    chunks.
    """

    def blocks(rank: int, peers: list[int]) -> list[Block]:
        found: list[Block] = []
        for part in range(count):
            split = {"tbg_info": {"tb_id": part, "tbg_size": count}}
            sends = [
                {"name": "ppkt", "src_buff": [own("i", peer)], "dst_buff": [remote(peers, peer, "s", rank)]}
                for peer in peers
            ]
            reduce = {
                "name": "respkt",
                "src_buff": [own("i", rank), *(own("s", peer) for peer in peers)],
                "dst_buff": [own("o", rank), *(remote(peers, peer, "s", ranks + rank) for peer in peers)],
            }
            unpacks = [
                {"name": "upkt", "src_buff": [own("s", ranks + peer)], "dst_buff": [own("o", peer)]} for peer in peers
            ]
            found.append([{**op, "channel_type": "memory", **split} for op in (*sends, reduce, *unpacks)])
        return found

    return plan(ranks, f"packets, {count} threadblocks", blocks, 2 * ranks)


_PLANS = {"plan, writes": writes, "plan, reads and writes": reads_and_writes, "plan, packets": by_packets}


class Arrays:
    """Input and output for one message size, and the expected output.

    Args:
        job: the ranks.
        own: registered memory, as long as the longest input and output.
        count: number of elements.
        dtype: name of the element type.
    """

    def __init__(self, job: Job, own: tuple[Any, Any], count: int, dtype: str) -> None:
        self._job, self._comm = job, job.comm
        self.x, self.out = (whole[:count] for whole in own)
        self._registered: tuple[RegisteredMemory, ...] = tuple(self._comm.register(each) for each in (self.x, self.out))
        total: Any = 0
        for rank, given in enumerate(random_inputs(job, count, dtype, fresh_seed(job))):
            total = total + given  # the inputs are small whole numbers, so the sum is exact
            if rank == job.rank:
                self._given = given
        self._expected = total

    def contender(self, name: str) -> Contender:
        """Returns a contender that reduces these arrays."""
        stream = self._job.handle
        if name == _TWO_SHOT:
            return self._contender(
                name, lambda: self._comm.all_reduce(self.x, out=self.out, algorithm=name, stream=stream)
            )
        nbytes = self._registered[0].nbytes
        defaults = self._comm.runtime.launch_defaults
        most = min(_MOST_THREADBLOCKS, defaults.blocks)
        count = max(1, min(most, nbytes // defaults.bytes_per_block))
        made = _PLANS[name](self._job.ranks, count)
        x, out = self._registered
        return self._contender(name, lambda: self._comm.execute(made, x, out=out, stream=stream))

    def _contender(self, name: str, call: Callable[[], object]) -> Contender:
        def refill() -> None:
            self.x[:] = self._given
            self._job.poison(self.out)

        return Contender(name, True, call, refill, lambda _: differing(self.out, self._expected))

    def close(self) -> None:
        """Deregisters the arrays, once all ranks have measured."""
        self._job.world.Barrier()
        for memory in self._registered:
            self._comm.deregister(memory)


def compare(case: Case, timings: list[Timing]) -> Fields | None:
    """Returns the times of the best plan and of two_shot, or None if either time is missing."""
    times = {timing.name: timing.time_us for timing in timings if timing.time_us}
    plans = {name: took for name, took in times.items() if name != _TWO_SHOT}
    if _TWO_SHOT not in times or not plans:
        return None
    best = min(plans, key=lambda name: plans[name])
    return {
        "size": case.nbytes,
        "type": case.dtype,
        "two_shot_us": times[_TWO_SHOT],
        "plan_us": plans[best],
        "plan": best,
        "plan_over_two_shot": plans[best] / times[_TWO_SHOT],
    }


_SUMMARY = (
    Column("size", "", 8),
    Column("type", "", 8),
    Column("two_shot", "(µs)", 9, ".2f"),
    Column("best plan", "(µs)", 9, ".2f"),
    Column("", "", 22, left=True),
    Column("plan/two_shot", "", 13, ".2f"),
)


def summarise(comparisons: list[Fields]) -> None:
    """Prints the time of the best plan beside two_shot's time, for each size."""
    worst = max((row["plan_over_two_shot"] for row in comparisons), default=math.nan)
    print(f"#\n# the best plan beside two_shot; at most {worst:.2f} times as long, aim {aims.PLAN_OVER_TWO_SHOT}")
    table = Table(_SUMMARY)
    table.header()
    for row in comparisons:
        table.row(show_size(row["size"]), *list(row.values())[1:])


def main() -> int:
    parser = arguments(__doc__.splitlines()[0], _SIZES, _QUICK_SIZES)
    parsed = parser.parse_args()
    names = parsed.algorithms or [_TWO_SHOT, *_PLANS]
    for name in names:
        if name != _TWO_SHOT and name not in _PLANS:
            parser.error(f"--algorithms: expected some of {', '.join((_TWO_SHOT, *_PLANS))}, not {name!r}")
    with open_job(parsed.seconds) as job:
        if job.comm.runtime.name == "host":
            parsed.default_sizes = parsed.quick_sizes = _HOST_SIZES
        parsed = resolve(parsed)
        method = f"{job.timing}, registered arrays; median of {parsed.repeats}, maximum over ranks"
        job.heading("execution plans", method)
        factor, table = bus_factor("all_reduce", job.ranks), Table(COLUMNS)
        if job.first:
            table.header()
        rows: list[Fields] = []
        comparisons: list[Fields] = []
        skipped = []
        for dtype in job.element_types(parsed.dtypes):
            itemsize = job.empty(0, dtype).itemsize
            unit = 16 // itemsize * job.ranks  # each rank's chunk must be a multiple of 16 bytes
            longest = max(unit, max(parsed.sizes) // itemsize)
            own = job.registered(longest, dtype), job.registered(longest, dtype)
            for size in parsed.sizes:
                if not job.in_time():
                    skipped.append(f"{show_size(size)} {dtype}")
                    continue
                count = max(unit, size // itemsize // unit * unit)
                arrays = Arrays(job, own, count, dtype)
                wanted = [name for name in names if "packets" not in name or size <= _LONGEST_PACKETS]
                timings = job.measure([arrays.contender(name) for name in wanted], parsed.repeats)
                arrays.close()
                case = Case(count * itemsize, count, dtype, "sum", factor)
                compared = compare(case, timings)
                if compared is not None:
                    comparisons.append(compared)
                rows += show(job, table, case, timings)
        if job.first:
            summarise(comparisons)
        results: Fields = {"benchmark": "execution_plans", "method": method, "comparison": comparisons}
        return job.finish(parsed, rows, skipped, results)


if __name__ == "__main__":
    sys.exit(main())
