"""Execution plans beside the shipped all_reduce: mpiexec -n 2 python -m mpi4py benchmarks/execution_plans.py

Contenders, each an all-reduction of float32 from one array to another, all registered:
- two_shot, the shipped kernel;
- a plan in which each rank reads its share of all inputs, reduces it, and writes it to all outputs;
- a plan in which shares go to their owners and back as packets, up to 4 MiB.
Calls are captured in no graph. They are issued in bursts behind a barrier, the contenders by turns. A time is that of a
burst on the slowest rank, divided by its calls; the table shows the median over bursts. Outputs are checked.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI
from program import common_arguments, describe, end_if_it_hangs, heading

from proxyccl import Communicator, ExecutionPlan
from proxyccl.channels.tools.options import show_size
from proxyccl.channels.tools.results import Fields, write_json
from proxyccl.channels.tools.tables import Column, Table

_KIB = 1024
_SIZES = tuple(_KIB << shift for shift in (2, 6, 10, 12, 14, 16, 18))
_QUICK_SIZES = (4 * _KIB, 256 * _KIB)
_LONGEST_PACKETS = 4096 * _KIB
_BURST, _BURSTS, _QUICK_BURSTS = 10, 20, 3
_NAMES = ("two_shot", "plan, reads and writes", "plan, packets")
_COLUMNS = (
    Column("size", "", 8),
    *(Column(name, "(µs)", 23, ".1f") for name in _NAMES),
    Column("plan/two_shot", "", 14, ".2f"),
    Column("wrong", "", 6),
)

Block = list[dict[str, Any]]


def plan(ranks: int, name: str, blocks: Callable[[int, list[int]], list[Block]], scratch: int) -> ExecutionPlan:
    """A plan of all_reduce whose threadblocks `blocks` gives, by rank and peers."""
    gpus = []
    for rank in range(ranks):
        peers = [peer for peer in range(ranks) if peer != rank]
        count = len(peers)
        uses = {
            "channels": [{"channel_type": "memory", "channel_ids": list(range(count))}],
            "remote_buffer_refs": [{"access_channel_type": "memory", "remote_buffer_ids": list(range(3 * count))}],
        }
        gpus.append(
            {
                "id": rank,
                "input_chunks": ranks,
                "output_chunks": ranks,
                "scratch_chunks": scratch,
                "threadblocks": [{"id": i, "ops": ops, **uses} for i, ops in enumerate(blocks(rank, peers))],
                "channels": [{"channel_type": "memory", "connected_to": peers}],
                "remote_buffers": [
                    {"rank": peer, "type": kind, "access_channel_types": ["memory"]} for kind in "ios" for peer in peers
                ],
            }
        )
    packets = scratch > 0
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
    """A chunk of a peer."""
    return {"buffer_id": "ios".index(kind) * len(peers) + peers.index(peer), "index": index, "size": 1}


def own(kind: str, index: int) -> dict[str, Any]:
    """A chunk of the rank itself."""
    return {"type": kind, "index": index, "size": 1}


def reads_and_writes(ranks: int, count: int) -> ExecutionPlan:
    """With `count` threadblocks."""

    def blocks(rank: int, peers: list[int]) -> list[Block]:
        channels = {"channel_ids": list(range(len(peers))), "channel_type": "memory"}
        meet: Block = [{"name": "nop"}, {"name": "signal", **channels}, {"name": "wait", **channels}, {"name": "nop"}]
        barrier = {"name": "barrier", "barrier_id": 0, "num_threadblocks": count}
        reduce = {
            "name": "rres",
            "src_buff": [own("i", rank), *(remote(peers, peer, "i", rank) for peer in peers)],
            "dst_buff": [own("o", rank), *(remote(peers, peer, "o", rank) for peer in peers)],
            "channel_type": "memory",
        }
        return [
            [
                *([] if block else meet),
                barrier,
                {**reduce, "tbg_info": {"tb_id": block, "tbg_size": count}},
                barrier,
                *([] if block else meet),
            ]
            for block in range(count)
        ]

    return plan(ranks, f"reads and writes, {count} threadblocks", blocks, 0)


def by_packets(ranks: int, count: int) -> ExecutionPlan:
    """With `count` threadblocks for each chunk that is sent, and as many that reduce."""

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


def measure(comm: Communicator, size: int, plans: list[ExecutionPlan], bursts: int) -> Fields:
    """A row: the median times in µs, and the number of wrong values."""
    count = size // 4
    x, out = (comm.register(comm.empty(count, "float32")) for _ in range(2))
    given = np.arange(count, dtype=np.float32) % 251
    x.array.upload(given + comm.rank)
    expected = given * comm.world_size + sum(range(comm.world_size))
    calls: dict[str, Callable[[], object]] = {
        _NAMES[0]: lambda: comm.all_reduce(x.array, out=out.array, algorithm="two_shot"),
        _NAMES[1]: lambda: comm.execute(plans[0], x, out=out),
    }
    if size <= _LONGEST_PACKETS:
        calls[_NAMES[2]] = lambda: comm.execute(plans[1], x, out=out)
    wrong = 0
    for call in calls.values():
        out.array.fill(0)
        MPI.COMM_WORLD.Barrier()
        call()
        comm.synchronize()
        wrong += int(np.count_nonzero(out.array.numpy() != expected))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(bursts):
        for name, call in calls.items():
            MPI.COMM_WORLD.Barrier()
            start = time.perf_counter()
            for _ in range(_BURST):
                call()
            comm.synchronize()
            took = (time.perf_counter() - start) * 1e6 / _BURST
            times[name].append(MPI.COMM_WORLD.allreduce(took, MPI.MAX))
    MPI.COMM_WORLD.Barrier()
    comm.deregister(x)
    comm.deregister(out)
    medians = {name: statistics.median(times[name]) if name in times else None for name in _NAMES}
    return {"size": size, "times_us": medians, "wrong": MPI.COMM_WORLD.allreduce(wrong)}


def main() -> int:
    parsed = common_arguments(__doc__.splitlines()[0]).parse_args()
    end_if_it_hangs(parsed.seconds)
    with Communicator() as comm:
        blocks = 1 if comm.runtime.name == "host" else 64
        plans = [reads_and_writes(comm.world_size, blocks), by_packets(comm.world_size, blocks)]
        heading(comm, "execution plans", f"float32 sum, registered arrays, {blocks} threadblocks; slowest rank")
        table, rows = Table(_COLUMNS), []
        if comm.rank == 0:
            table.header()
        for size in _QUICK_SIZES if parsed.quick or comm.runtime.name == "host" else _SIZES:
            row = measure(comm, size, plans, _QUICK_BURSTS if parsed.quick else _BURSTS)
            rows.append(row)
            if comm.rank == 0:
                took = row["times_us"]
                fastest = min(took[name] for name in _NAMES[1:] if took[name] is not None)
                table.row(show_size(size), *took.values(), fastest / took[_NAMES[0]], row["wrong"])
        if comm.rank == 0 and parsed.json:
            write_json(parsed.json, {"benchmark": "execution_plans", **describe(comm), "results": rows})
        return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
