"""Collectives of the host runtime compared with MPI's: mpiexec -n 4 python -m mpi4py host_collectives.py

Our contender `registered` uses arrays of `Communicator.empty`; our contender `private` and MPI use numpy arrays. With
`--gloo`, torch's gloo is measured too: it copies its input, and reduces the copy in place. gloo finds the first rank by
``MASTER_ADDR`` and ``MASTER_PORT``. Our calls use no stream, so a call returns when it is complete, as MPI's calls do.
Contenders alternate in bursts of equally many calls. Before each burst the ranks wait for each other over separate
sockets, because MPI's barrier would occupy cores by spinning, and would keep MPI's connections warm. A time is the time
of a burst on the slowest rank, divided by the number of calls; tables show the median over bursts. Outputs are checked
before and after the measurement.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray
from program import common_arguments, describe, end_if_it_hangs, heading

from proxyccl import Array, Communicator
from proxyccl.tools import options
from proxyccl.tools.options import show_size
from proxyccl.tools.results import Fields, write_json
from proxyccl.tools.tables import Column, Table

_KIB = 1024
_SIZES = tuple(_KIB << shift for shift in (0, 4, 6, 8, 10, 12, 14))
_QUICK_SIZES = (1 * _KIB, 64 * _KIB, 1024 * _KIB)
_OF_MPI = {
    "all_reduce": "Allreduce",
    "all_gather": "Allgather",
    "all_to_all": "Alltoall",
    "reduce_scatter": "Reduce_scatter_block",
}
_TIMEOUT = 20.0
_BURST_US = 4000.0  # how long a burst of the fastest contender should take
_MOST_CALLS = 20

Floats = NDArray[np.float32]

_OURS = ("registered", "private")


@dataclass(frozen=True)
class Contender:
    """A library's call of one collective.

    Attributes:
        name: "registered", "private", "MPI" or "gloo".
        call: makes the call and returns when it is done.
        out: the array that the call writes; it has `fill` and `__dlpack__`.
    """

    name: str
    call: Callable[[], object]
    out: Any


def expected_output(collective: str, given: Floats, rank: int) -> Floats:
    """Returns the result expected on one rank. The input of rank i is `given[i]`, or, for all_gather, the first share
    of `given[i]`.
    """
    ranks, count = given.shape
    shares = given.reshape(ranks, ranks, count // ranks)
    if collective == "all_reduce":
        return given.sum(axis=0)
    if collective == "reduce_scatter":
        return shares[:, rank].sum(axis=0)
    return shares[:, 0 if collective == "all_gather" else rank].ravel()


def reduced_by_gloo(source: Floats) -> Contender:
    """Returns the contender that calls all_reduce of torch's gloo. Makes gloo's process group if it does not exist."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        world = MPI.COMM_WORLD
        dist.init_process_group("gloo", rank=world.rank, world_size=world.size)
    out = np.empty_like(source)
    given, result = torch.from_numpy(source), torch.from_numpy(out)

    def call() -> None:
        result.copy_(given)
        dist.all_reduce(result)

    return Contender("gloo", call, out)


def contenders(
    comm: Communicator, collective: str, count: int, *, gloo: bool = False
) -> tuple[list[Contender], Floats]:
    """Returns the contenders for a call whose longer array has `count` elements, and the expected output."""
    world, ranks = MPI.COMM_WORLD, comm.world_size
    given = np.arange(ranks * count, dtype=np.float32).reshape(ranks, count) % 251  # the sums of these values are exact
    source = given[comm.rank] if collective != "all_gather" else given[comm.rank, : count // ranks]
    expected = expected_output(collective, given, comm.rank)

    def ours(name: str, x: Any, out: Any) -> Contender:
        return Contender(name, functools.partial(getattr(comm, collective), x, out=out), out)

    def own_memory(like: Floats) -> Array:
        return comm.empty(like.size, "float32").upload(like)

    x, out, mpi_out = source.copy(), np.empty_like(expected), np.empty_like(expected)
    made = [
        ours("registered", own_memory(source), own_memory(expected)),
        ours("private", x, out),
        Contender("MPI", functools.partial(getattr(world, _OF_MPI[collective]), x, mpi_out), mpi_out),
    ]
    return [*made, *([reduced_by_gloo(x)] if gloo else [])], expected


def wrong(contender: Contender, expected: Floats) -> int:
    """Makes a call into a poisoned output. Returns the number of wrong elements."""
    contender.out.fill(np.nan)
    MPI.COMM_WORLD.Barrier()
    contender.call()
    return int(np.count_nonzero(np.from_dlpack(contender.out) != expected))


def burst(comm: Communicator, contender: Contender, calls: int) -> float:
    """Makes a burst of calls. Returns the time per call on this rank in µs."""
    comm.group.exchange.barrier("a burst of calls")
    start = time.perf_counter()
    for _ in range(calls):
        contender.call()
    return (time.perf_counter() - start) * 1e6 / calls


def measure(comm: Communicator, collective: str, nbytes: int, bursts: int, *, gloo: bool = False) -> Fields:
    """Measures one collective at one size. Returns the times, the same on all ranks."""
    world = MPI.COMM_WORLD
    made, expected = contenders(comm, collective, nbytes // 4, gloo=gloo)
    found = sum(wrong(contender, expected) for contender in made)
    warm = [min(world.allreduce(burst(comm, contender, 2), MPI.MAX) for _ in range(3)) for contender in made]
    calls = max(1, min(_MOST_CALLS, int(_BURST_US / min(warm))))
    times = np.zeros((bursts, len(made)))
    # The contenders run in all orders, because threads that one contender leaves awake affect the next contender.
    orders = np.random.default_rng(nbytes).permutation(list(itertools.permutations(range(len(made)))))
    for turn in range(bursts):
        for which in orders[turn % len(orders)]:
            times[turn, which] = burst(comm, made[which], calls)
    world.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    found += sum(wrong(contender, expected) for contender in made)
    median = {c.name: statistics.median(times[:, i].tolist()) for i, c in enumerate(made)}
    return {
        "collective": collective,
        "size": nbytes,
        **{f"{name.lower()}_us": time_us for name, time_us in median.items()},
        **{
            f"{peer.lower()}_over_{own}": median[peer] / median[own]
            for peer in median
            for own in _OURS
            if peer not in _OURS
        },
        "wrong": world.allreduce(found),
    }


def columns(peers: list[str]) -> tuple[Column, ...]:
    return (
        Column("collective", "", 15, left=True),
        Column("size", "", 8),
        *(Column(name, "(µs)", 11, ".1f") for name in (*_OURS, *peers)),
        *(Column(f"{peer}/{own[:4]}.", "", 11, ".2f") for peer in peers for own in _OURS),
        Column("wrong", "", 6),
    )


def main() -> int:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("-s", "--sizes", type=options.size, nargs="+", metavar="SIZE", help="bytes, such as 64K")
    parser.add_argument("-c", "--collectives", nargs="+", choices=list(_OF_MPI), default=list(_OF_MPI))
    parser.add_argument("-r", "--repeats", type=options.count, help="timed bursts of each contender")
    parser.add_argument("--gloo", action="store_true", help="also torch's gloo, for all_reduce alone")
    parsed = parser.parse_args()
    sizes = parsed.sizes or (_QUICK_SIZES if parsed.quick else _SIZES)
    bursts = parsed.repeats or (12 if parsed.quick else 48)  # number of bursts per contender, over all orders
    if parsed.gloo and parsed.collectives != ["all_reduce"]:
        parser.error("--gloo is for --collectives all_reduce")
    end_if_it_hangs(parsed.seconds)
    method = f"float32, out of place; median of {bursts} bursts of the slowest rank"
    rows = []
    with Communicator.from_mpi(runtime="host", timeout=_TIMEOUT) as comm:
        heading(comm, "host collectives", method)
        table = Table(columns(["MPI", "gloo"] if parsed.gloo else ["MPI"]))
        if comm.rank == 0:
            table.header()
        for collective in parsed.collectives:
            for size in sizes:
                row = measure(comm, collective, size, bursts, gloo=parsed.gloo)
                rows.append(row)
                if comm.rank == 0:
                    table.row(collective, show_size(size), *list(row.values())[2:])
        if comm.rank == 0 and parsed.json:
            hosts = len({info.host for info in comm.topology.ranks})
            write_json(
                parsed.json,
                {
                    "benchmark": "between_hosts" if hosts > 1 else "host_collectives",
                    **describe(comm),
                    "hosts": hosts,
                    "method": method,
                    "results": rows,
                },
            )
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
