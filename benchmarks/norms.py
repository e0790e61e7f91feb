"""all_reduce with residual and RMSNorm, fused or in separate calls: mpiexec -n 2 python -m mpi4py benchmarks/norms.py

As between the layers of a tensor-parallel decoder, each rank has rows of a partial sum, and all ranks have the same
residual and weight. The contenders are

- all_reduce alone, which no other contender can beat;
- all_reduce_rms_norm, also without a weight (which only adds the residual), with a residual that is divided among the
  ranks, and with float8 rows and their scales;
- all_reduce, followed by the addition and the norm as torch.compile fuses them. Only on GPUs.

The sums are exact, so they must be equal bit by bit; normalized rows may differ by rounding. gpu_job.py says how times
are measured.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import aims
from collectives import bus_factor
from jobs import open_job
from program import common_arguments
from side_by_side import COLUMNS, Case, Contender, Job, Timing, absent, fresh_seed, random_inputs, show

from proxyccl.tools import options
from proxyccl.tools.results import Fields
from proxyccl.tools.tables import Column, Table

ALONE, FUSED, APART = "all_reduce", "all_reduce_rms_norm", "all_reduce, then torch.compile"
DIVIDED = "all_reduce_rms_norm, divided residual"
ADDED, FLOAT8 = "all_reduce_rms_norm, no weight", "all_reduce_rms_norm, float8"
_EPSILON = 1e-6
_ROWS = (1, 6, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_QUICK_ROWS = (1, 16, 128)
_NEAR, _NEAR_FLOAT8 = 0.01, 0.07  # allowed relative errors; bfloat16 has 8 significant bits, and float8 has 4


def arguments() -> argparse.ArgumentParser:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--rows", type=options.count, nargs="+", metavar="N", help="numbers of rows")
    parser.add_argument("--width", type=options.count, default=7168, help="elements of a row (default %(default)s)")
    parser.add_argument("-r", "--repeats", type=options.count, help="timed bursts of each contender")
    return parser


def widened(x: Any) -> Any:
    """Returns an array or a tensor in float32."""
    return x.float() if hasattr(x, "float") else x.astype("float32")


class Layer:
    """The arrays for one number of rows, and the expected results.

    Args:
        job: the ranks.
        rows, width: the shape of the arrays.
        dtype: name of the element type.
    """

    def __init__(self, job: Job, rows: int, width: int, dtype: str) -> None:
        self._job, self._count = job, rows * width
        seed = fresh_seed(job)
        total: Any = 0
        for rank, given in enumerate(random_inputs(job, self._count, dtype, seed)):
            total = total + given
            if rank == job.rank:
                self.x = given.reshape(rows, width)
        self.residual = job.random(self._count, dtype, seed - 1).reshape(rows, width)
        self.weight = job.random(width, dtype, seed - 2)
        self.out, self.residual_out = (job.empty(self._count, dtype).reshape(rows, width) for _ in range(2))
        self._sums = total.reshape(rows, width)
        self._added = self._sums + self.residual
        added = widened(self._added)
        mean = (added * added).mean(-1).reshape(rows, 1)
        self._normalized = added / (mean + _EPSILON) ** 0.5 * widened(self.weight)

    def _poison(self) -> None:
        for each in (self.out, self.residual_out):
            self._job.poison(each.reshape(-1))

    def _wrong(self, *, sums: bool = False, normalized: bool = True) -> int:
        if sums:
            return int((self.out != self._sums).sum())
        wrong = int((self.residual_out != self._added).sum())
        if normalized:
            near = _NEAR * abs(self._normalized) + 1e-6
            wrong += int((abs(widened(self.out) - self._normalized) > near).sum())
        return wrong

    def contenders(self) -> list[Contender]:
        """Returns the contenders, in the order of the table."""
        comm, stream = self._job.comm, self._job.handle
        given, to = (self.x, self.residual), {"residual_out": self.residual_out, "stream": stream}
        share, left = divmod(len(self.x), comm.world_size)
        own, own_out = (
            each[comm.rank * share : (comm.rank + 1) * share] for each in (self.residual, self.residual_out)
        )

        def fill() -> None:
            self._poison()
            self.residual_out[...] = self._added  # the other ranks' shares, which the call does not write
            self._job.poison(own_out.reshape(-1))

        divided = Contender(
            DIVIDED,
            True,
            lambda: comm.all_reduce_rms_norm(
                self.x, own, self.weight, _EPSILON, out=self.out, residual_out=own_out, stream=stream
            ),
            fill,
            lambda _: self._wrong(),
        )
        return [
            Contender(
                ALONE,
                True,
                lambda: comm.all_reduce(self.x, out=self.out, stream=stream),
                self._poison,
                lambda _: self._wrong(sums=True),
            ),
            Contender(
                FUSED,
                True,
                lambda: comm.all_reduce_rms_norm(*given, self.weight, _EPSILON, out=self.out, **to),
                self._poison,
                lambda _: self._wrong(),
            ),
            Contender(
                ADDED,
                True,
                lambda: comm.all_reduce_rms_norm(*given, None, _EPSILON, **to),
                self._poison,
                lambda _: self._wrong(normalized=False),
            ),
            absent(DIVIDED, "the ranks have unequal shares of the rows") if left else divided,
            *(self._on_gpus() if self._job.device != "cpu" else [absent(name, "it needs GPUs") for name in _ON_GPUS]),
        ]

    def _on_gpus(self) -> list[Contender]:
        import torch

        comm, stream = self._job.comm, self._job.handle
        rows, scales = torch.empty_like(self.x, dtype=torch.float8_e4m3fn), self.x.new_empty(len(self.x), 1).float()
        total = torch.empty_like(self.x)

        @torch.compile
        def add_and_norm(total: Any, residual: Any, weight: Any) -> tuple[Any, Any]:
            added = total + residual
            normalized = torch.nn.functional.rms_norm(added.float(), added.shape[-1:], weight.float(), _EPSILON)
            return normalized.to(added.dtype), added

        def by_compiler() -> None:
            comm.all_reduce(self.x, out=total, stream=stream)
            self.out, self.residual_out = add_and_norm(total, self.residual, self.weight)

        def poison() -> None:
            self._poison()
            for each in (rows, scales):
                self._job.poison(each.reshape(-1))

        def wrong(_: int) -> int:
            near = _NEAR_FLOAT8 * abs(self._normalized) + scales * 2**-9  # float8's smallest step
            return self._wrong(normalized=False) + int((abs(rows.float() * scales - self._normalized) > near).sum())

        return [
            Contender(
                FLOAT8,
                True,
                lambda: comm.all_reduce_rms_norm(
                    self.x,
                    self.residual,
                    self.weight,
                    _EPSILON,
                    out=rows,
                    residual_out=self.residual_out,
                    scales=scales,
                    quantize="float8",
                    stream=stream,
                ),
                poison,
                wrong,
            ),
            Contender(APART, False, by_compiler, self._poison, lambda _: self._wrong()),
        ]


_ON_GPUS = (FLOAT8, APART)


def compare(rows: int, width: int, timings: list[Timing]) -> Fields:
    """Returns, for each contender, its time with a given number of rows."""
    return {"rows": rows, "width": width, "times_us": {timing.name: timing.time_us for timing in timings}}


_SUMMARY = (
    Column("rows", "", 6),
    Column("alone", "(µs)", 9, ".2f"),
    Column("one call", "(µs)", 9, ".2f"),
    Column("over", "(µs)", 9, ".2f"),
    Column("apart", "(µs)", 9, ".2f"),
)


def summarise(comparisons: list[Fields]) -> None:
    """Prints the time that the norm adds to the all_reduce."""
    print(f"#\n# one call beside all_reduce alone; aim: {aims.NORM_US:g} µs over it, or {aims.NORM_OVER_ALONE:g} times")
    table = Table(_SUMMARY)
    table.header()
    for row in comparisons:
        alone, fused, apart = (row["times_us"][name] for name in (ALONE, FUSED, APART))
        table.row(str(row["rows"]), alone, fused, None if None in (alone, fused) else fused - alone, apart)


def main() -> int:
    parsed = arguments().parse_args()
    with open_job(parsed.seconds) as job:
        on_host = job.comm.runtime.name == "host"
        repeats = parsed.repeats or (5 if parsed.quick else 15)
        wanted = parsed.rows or (_QUICK_ROWS if parsed.quick or on_host else _ROWS)
        dtype = "float16" if on_host else "bfloat16"
        method = f"{job.timing}; median of {repeats}, maximum over ranks"
        job.heading("all_reduce with RMSNorm", method)
        factor, table = bus_factor("all_reduce", job.ranks), Table(COLUMNS)
        if job.first:
            table.header()
        rows: list[Fields] = []
        comparisons: list[Fields] = []
        skipped = []
        for count in wanted:
            if not job.in_time():
                skipped.append(f"{count} rows")
                continue
            with job.current():
                layer = Layer(job, count, parsed.width, dtype)
            timings = job.measure(layer.contenders(), repeats)
            comparisons.append(compare(count, parsed.width, timings))
            elements = count * parsed.width
            rows += show(job, table, Case(2 * elements, elements, dtype, "sum", factor), timings)
        if job.first:
            summarise(comparisons)
        return job.finish(parsed, rows, skipped, {"benchmark": "norms", "method": method, "comparison": comparisons})


if __name__ == "__main__":
    sys.exit(main())
