"""Time to a communicator of fewer ranks: mpiexec -n 4 python -m mpi4py benchmarks/regroup.py

Contenders, each making a communicator of all ranks but the last:
- `Communicator` over MPI;
- `split`, whose result ends with the whole;
- `shrink`, whose result does not, and which bears the loss of ranks.
A time is that of the slowest rank, from a barrier until the call returns, and until the new communicator's first
all_reduce of 1 KiB has ended. The contenders take turns; the table shows medians. Results are checked.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI
from program import common_arguments, describe, end_if_it_hangs, heading

from proxyccl import Communicator
from proxyccl.channels.tools.results import write_json
from proxyccl.channels.tools.tables import Column, Table

_TURNS, _QUICK_TURNS = 20, 2
_COUNT = 256
_COLUMNS = (
    Column("made by", "", 16, left=True),
    Column("call", "(ms)", 9, ".2f"),
    Column("with all_reduce", "(ms)", 16, ".2f"),
)


def contenders(part: MPI.Intracomm, whole: Communicator) -> dict[str, Callable[[], Communicator]]:
    """What makes a communicator of the ranks of `part`, by name."""
    members = list(range(part.Get_size()))
    last = whole.world_size - 1
    return {
        "Communicator": lambda: Communicator(part),
        "split": lambda: whole.split(members),
        "shrink": lambda: whole.shrink(exclude=[last]),
    }


def measure(name: str, wrong: list[str]) -> tuple[float, float]:
    """The two times of a contender, in ms."""
    rank, last = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size() - 1
    times = [0.0, 0.0]
    part = MPI.COMM_WORLD.Split(int(rank == last))
    with Communicator() as whole:
        x = whole.empty(_COUNT, "float32").fill(1)
        whole.all_reduce(x)
        whole.synchronize()
        MPI.COMM_WORLD.Barrier()
        if rank != last:
            began = time.perf_counter()
            made = contenders(part, whole)[name]()
            times[0] = time.perf_counter() - began
            made.all_reduce(x)
            made.synchronize()
            times[1] = time.perf_counter() - began
            if np.any(x.numpy() != (last + 1) * last):
                wrong.append(name)
            made.close()
        MPI.COMM_WORLD.Barrier()
    part.Free()
    return MPI.COMM_WORLD.allreduce(times[0], MPI.MAX) * 1e3, MPI.COMM_WORLD.allreduce(times[1], MPI.MAX) * 1e3


def main() -> int:
    parsed = common_arguments(__doc__.splitlines()[0]).parse_args()
    end_if_it_hangs(parsed.seconds)
    names = ("Communicator", "split", "shrink")
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    wrong: list[str] = []
    deadline = time.monotonic() + parsed.seconds
    with Communicator() as comm:
        heading(comm, "communicators of fewer ranks", "median; slowest rank")
        for _ in range(_QUICK_TURNS if parsed.quick else _TURNS):
            for name in names:
                times[name].append(measure(name, wrong))
            if MPI.COMM_WORLD.bcast(time.monotonic() > deadline):
                break
        failed = MPI.COMM_WORLD.allreduce(len(wrong))
        if comm.rank == 0:
            table, rows = Table(_COLUMNS), []
            table.header()
            for name in names:
                call, first = (statistics.median(column) for column in zip(*times[name], strict=True))
                table.row(name, call, first)
                rows.append({"made_by": name, "call_ms": call, "with_all_reduce_ms": first})
            print(f"# wrong results: {failed}")
            if parsed.json:
                write_json(parsed.json, {"benchmark": "regroup", **describe(comm), "results": rows})
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
