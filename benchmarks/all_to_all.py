"""All-to-all beside NCCL's all_to_all_single: mpiexec -n 4 python -m mpi4py all_to_all.py

A size is what one rank sends, its share to itself included. Out of place. How it is measured: side_by_side.py.
"""

from __future__ import annotations

import sys

import aims
import torch
import torch.distributed as dist
from side_by_side import (
    COLUMNS,
    DTYPES,
    Case,
    Contender,
    Job,
    arguments,
    differing,
    fresh_seed,
    geometric_mean,
    poison,
    random_inputs,
    resolve,
    show,
)

from proxyccl.channels.tools.bench_collectives import bus_factor
from proxyccl.channels.tools.options import show_size
from proxyccl.channels.tools.report import Report, Table

_ALGORITHMS = ("auto", "proxy")
_QUICK_SIZES = (4 * aims.KIB, 1 * aims.MIB, 64 * aims.MIB)


def contenders(job: Job, count: int, dtype: str, names: list[str]) -> list[Contender]:
    """Ours by name, then NCCL, on the same buffers of so many elements."""
    share = count // job.ranks
    mine = slice(job.rank * share, (job.rank + 1) * share)
    out = torch.empty(count, dtype=DTYPES[dtype], device=job.device)
    expected = torch.empty_like(out)
    source = torch.empty_like(out)
    for rank, given in enumerate(random_inputs(job, count, DTYPES[dtype], fresh_seed(job))):
        expected[rank * share : (rank + 1) * share] = given[mine]
        if rank == job.rank:
            source = given
    stream = job.stream.cuda_stream

    def contender(name: str) -> Contender:
        algorithm = None if name == "auto" else name
        return Contender(
            name,
            True,
            lambda: job.comm.all_to_all(source, out=out, algorithm=algorithm, stream=stream),
            lambda: poison(out),
            lambda _: differing(out, expected),
        )

    nccl = Contender(
        "NCCL",
        False,
        lambda: dist.all_to_all_single(out, source),
        lambda: poison(out),
        lambda _: differing(out, expected),
    )
    return [*map(contender, names), nccl]


def main() -> int:
    parser = arguments(__doc__.splitlines()[0], aims.ALL_REDUCE_SIZES, _QUICK_SIZES)
    parsed = resolve(parser.parse_args())
    names = parsed.algorithms or list(_ALGORITHMS)
    for name in names:
        if name not in _ALGORITHMS:
            parser.error(f"--algorithms: {name!r} is none of {', '.join(_ALGORITHMS)}")
    rows: list[Report] = []
    ratios: dict[str, list[float]] = {}
    skipped = []
    with Job(parsed.seconds) as job:
        job.heading("all_to_all", f"CUDA-graph replays, time a call; median of {parsed.repeats}, maximum over ranks")
        table = Table(COLUMNS)
        if job.first:
            table.header()
        for dtype in parsed.dtypes:
            itemsize = DTYPES[dtype].itemsize
            for size in parsed.sizes:
                if not job.in_time():
                    skipped.append(f"{show_size(size)} {dtype}")
                    continue
                count = max(job.ranks, size // itemsize // job.ranks * job.ranks)
                timings = job.measure(contenders(job, count, dtype, names), parsed.repeats)
                case = Case(count * itemsize, count, dtype, None, bus_factor("all_to_all", job.ranks))
                times = {timing.name: timing.time_us for timing in timings if timing.time_us}
                ours = [times[name] for name in names if name in times]
                if ours and "NCCL" in times:
                    ratios.setdefault(dtype, []).append(times["NCCL"] / min(ours))
                rows += show(job, table, case, timings)
        means = {dtype: geometric_mean(values) for dtype, values in ratios.items()}
        if job.first:
            for dtype, mean in means.items():
                print(f"# {dtype}: geometric mean of NCCL's time over the best of ours {mean:.2f}")
        report: Report = {
            "benchmark": "all_to_all",
            "method": f"CUDA-graph replay, out of place, median of {parsed.repeats}, maximum over ranks",
            "geometric_means": means,
        }
        return job.finish(parsed, rows, skipped, report)


if __name__ == "__main__":
    sys.exit(main())
