"""CPU time to issue a prepared collective: mpiexec -n 2 python -m mpi4py launch_cost.py

The collective is compared with torch's elementwise add, NCCL's all_reduce through torch, and the one-shot of torch
symmetric memory.

A burst of calls fits into an empty stream's queue, so no call waits for the GPU. A time is the wall-clock time in which
the slowest rank's thread issues one burst, divided by the number of calls. Tables show the median over bursts.
Contenders alternate.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable

import aims
import numpy as np
import torch
import torch.distributed as dist
from gpu_job import GpuJob, symmetric_memory
from mpi4py import MPI
from program import common_arguments

from proxyccl.device.arrays.array import current_stream
from proxyccl.tools.results import Fields
from proxyccl.tools.tables import Column, Table

_COUNT = 256  # number of elements: few, so that the kernels are as short as possible
_BURST = 100
_BURSTS = 60
_MANY = 4000  # more tensors than the library caches, so each tensor is new to the library

OURS_TORCH = "all_reduce, torch tensor"
PEERS = ("torch.add, out given", "NCCL all_reduce", "torch symmetric memory one-shot")
_COLUMNS = (
    Column("call", "", 52, left=True),
    Column("median", "(µs)", 8, ".2f"),
    Column("best", "(µs)", 8, ".2f"),
)


def calls(job: GpuJob) -> dict[str, Callable[[], object]]:
    """Returns the calls to issue, by name: our calls, other libraries' calls, then parts of our call."""
    x, y, out = (torch.zeros(_COUNT, device=job.device) for _ in range(3))
    array = job.comm.empty(_COUNT, "float32").fill(0)
    comm, handle, group = job.comm, job.stream.cuda_stream, job.group_name
    many = [torch.zeros(_COUNT, device=job.device) for _ in range(_MANY)]
    in_turn = itertools.cycle(many)
    symmetric, reason = symmetric_memory(job, _COUNT, torch.float32)
    if reason and job.first:
        print(f"# torch symmetric memory: {reason}")
    found = {
        OURS_TORCH: lambda: comm.all_reduce(x),
        f"all_reduce, {_MANY} torch tensors in turn": lambda: comm.all_reduce(next(in_turn)),
        "all_reduce, Array": lambda: comm.all_reduce(array),
        "all_reduce, torch tensor, stream given": lambda: comm.all_reduce(x, stream=handle),
        "all_reduce, Array, stream given": lambda: comm.all_reduce(array, stream=handle),
        PEERS[0]: lambda: torch.add(x, y, out=out),
        PEERS[1]: lambda: dist.all_reduce(y),
        "of ours: torch's current stream": lambda: current_stream(x),
        "of ours: issue, without arrays (barrier)": lambda: comm.barrier(stream=handle),
    }
    if symmetric is not None:
        symmetric.zero_()
        found[PEERS[2]] = lambda: torch.ops.symm_mem.one_shot_all_reduce(symmetric, "sum", group)
    return found


def measure(job: GpuJob, what: dict[str, Callable[[], object]], bursts: int) -> list[Fields]:
    """Measures each call. Returns a row for each call, the same on all ranks."""
    times = np.zeros((len(what), bursts))
    with torch.cuda.stream(job.stream):
        for burst in range(-2, bursts):  # the first two bursts are warm-ups
            for i, call in enumerate(what.values()):
                torch.cuda.synchronize()
                job.world.Barrier()
                start = time.perf_counter()
                for _ in range(_BURST):
                    call()
                if burst >= 0:
                    times[i, burst] = (time.perf_counter() - start) * 1e6 / _BURST
        torch.cuda.synchronize()
    slowest = np.empty_like(times)
    job.world.Allreduce(times, slowest, MPI.MAX)
    return [
        {"name": name, "median_us": statistics.median(row.tolist()), "best_us": float(row.min())}
        for name, row in zip(what, slowest, strict=True)
    ]


def main() -> int:
    parsed = common_arguments(__doc__.splitlines()[0]).parse_args()
    with GpuJob(parsed.seconds) as job:
        job.heading("launch cost", f"float32 sum of {_COUNT} elements in place, bursts of {_BURST}; slowest rank")
        rows = measure(job, calls(job), 10 if parsed.quick else _BURSTS)
        if job.first:
            table = Table(_COLUMNS)
            table.header()
            for row in rows:
                table.row(*row.values())
            ours = next(row["median_us"] for row in rows if row["name"] == OURS_TORCH)
            add = next(row["median_us"] for row in rows if row["name"] == PEERS[0])
            print(f"# ours {ours:.2f} µs beside torch.add {add:.2f} µs; aim {aims.ISSUE_US} µs beside 4.9 µs")
            job.write(parsed.json, {"benchmark": "launch_cost", "results": rows, "aim_us": aims.ISSUE_US})
    return 0


if __name__ == "__main__":
    sys.exit(main())
