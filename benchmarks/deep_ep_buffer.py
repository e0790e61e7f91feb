"""DeepEP's normal mode compared with NCCL's all_to_all_single: mpiexec -n 2 python -m mpi4py deep_ep_buffer.py

Every token chooses `--topk` different experts at random. A pair is a dispatch and its combine. The combine's input is a
tensor that the caller allocated, as an expert's result would be. Contenders:

- Buffer: `proxyccl.deep_ep.Buffer` with outputs of the exact size, so the CPU waits for each dispatch's number of rows
- Buffer, num_worst_tokens: the same class with outputs of a fixed size, so the CPU does not wait
- new outputs: fixed sizes too, but rows are first received in the layer's memory and then copied to new tensors
- NCCL: two all_to_all_single of the same number of bytes, to the experts and back, without packing and unpacking rows

A burst is ten pairs on one stream. If the CPU need not wait, a kernel blocks the stream until the CPU has issued the
burst's calls. Events around the calls measure the GPU's time. If the CPU waits for a dispatch, the dispatch's time
includes this wait. The issuing thread's time is the wall-clock time of the burst's calls. For each burst, the result is
the mean over the burst on the slowest rank; the table shows the median over bursts. Outputs are checked before and
after the measurement.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from gpu_job import GpuJob
from mpi4py import MPI
from program import common_arguments

from proxyccl import EPAll2AllLayer
from proxyccl.deep_ep import Buffer, Config
from proxyccl.tools import options
from proxyccl.tools.results import Fields
from proxyccl.tools.tables import Column, Table

_PAIRS, _SMS, _SLEEP_CYCLES = 10, 24, 20_000_000
_COLUMNS = (
    Column("tokens", "", 6),
    Column("contender", "", 26, left=True),
    Column("dispatch", "(µs)", 9, ".1f"),
    Column("combine", "(µs)", 9, ".1f"),
    Column("issuing", "(µs)", 9, ".1f"),
    Column("wrong", "", 6),
)


@dataclass(frozen=True)
class Tokens:
    """One rank's tokens, and the ranks to which each token goes."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    visits: torch.Tensor

    @staticmethod
    def random(job: GpuJob, count: int, hidden: int, topk: int, experts: int) -> Tokens:
        """Returns random tokens of whole numbers, so that sums are exact."""
        x = job.random(count * hidden, "bfloat16", job.rank).view(count, hidden)
        ids = torch.rand(count, experts, device=job.device).topk(topk, dim=1).indices
        visited = torch.stack([(ids // (experts // job.ranks) == rank).any(1) for rank in range(job.ranks)], 1)
        return Tokens(x, ids, torch.ones_like(ids, dtype=torch.float32), visited)


@dataclass(frozen=True)
class Contender:
    """Makes a dispatch (`there`) and its combine (`back`). `there` returns the rows and a state for `back`.

    Attributes:
        waits: whether `there` waits for the GPU.
    """

    name: str
    there: Callable[[], tuple[torch.Tensor, object]]
    back: Callable[[torch.Tensor, object], torch.Tensor | None]
    waits: bool = False


def contenders(job: GpuJob, buffer: Buffer, layer: EPAll2AllLayer, tokens: Tokens, experts: int) -> list[Contender]:
    """Returns the contenders for a given number of tokens."""
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(tokens.ids, experts)
    crossing = tokens.visits.sum(0)
    crossing[job.rank] = 0
    sent, received = crossing.tolist(), job.world.alltoall(crossing.tolist())
    packed = tokens.x[:1].expand(sum(sent), -1).contiguous()
    came = torch.empty(sum(received), tokens.x.shape[1], dtype=tokens.x.dtype, device=job.device)

    def of_buffer(**worst: int) -> Callable[[], tuple[torch.Tensor, object]]:
        def there() -> tuple[torch.Tensor, object]:
            rows, _, _, _, handle, _ = buffer.dispatch(
                tokens.x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=tokens.ids,
                topk_weights=tokens.weights,
                config=Config(_SMS),
                **worst,
            )
            assert isinstance(rows, torch.Tensor)
            return rows, handle

        return there

    def of_layer() -> tuple[torch.Tensor, object]:
        rows, _, desc = layer.dispatch(tokens.x, tokens.ids, tokens.weights)
        return rows, desc

    def nccl_there() -> tuple[torch.Tensor, object]:
        dist.all_to_all_single(came, packed, received, sent)
        return came, None

    def nccl_back(x: torch.Tensor, _: object) -> None:
        dist.all_to_all_single(packed, x, sent, received)

    combine = lambda x, handle: buffer.combine(x, handle)[0]  # noqa: E731
    return [
        Contender("Buffer", of_buffer(), combine, waits=True),
        Contender("Buffer, num_worst_tokens", of_buffer(num_worst_tokens=job.ranks * len(tokens.x)), combine),
        Contender("new outputs", of_layer, layer.combine),
        Contender("NCCL", nccl_there, nccl_back),
    ]


def wrong(contender: Contender, tokens: Tokens) -> int:
    """Makes a dispatch, doubles the rows as the experts' result, and makes the combine. Returns the number of wrong
    elements.
    """
    rows, handle = contender.there()
    back = contender.back(2 * rows, handle)
    expected = 2 * tokens.x.float() * tokens.visits.sum(1, keepdim=True)
    return 0 if back is None else int((back.float() != expected).sum())


def burst(job: GpuJob, contender: Contender, results: torch.Tensor) -> tuple[float, float, float]:
    """Returns the times in µs of a dispatch, of a combine, and of issuing both. `results` are the experts' results."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * _PAIRS + 1)]
    torch.cuda.synchronize()
    job.world.Barrier()
    if not contender.waits:
        torch.cuda._sleep(_SLEEP_CYCLES)
    job.comm.barrier(stream=torch.cuda.current_stream().cuda_stream)
    start = time.perf_counter()
    events[0].record()
    for pair in range(_PAIRS):
        rows, handle = contender.there()
        events[2 * pair + 1].record()
        contender.back(results[: len(rows)], handle)
        events[2 * pair + 2].record()
    issuing = (time.perf_counter() - start) * 1e6 / _PAIRS
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)]
    return sum(times[::2]) / _PAIRS, sum(times[1::2]) / _PAIRS, issuing


def measure(job: GpuJob, made: list[Contender], tokens: Tokens, bursts: int) -> list[Fields]:
    """Measures each contender. Returns the rows, the same on all ranks."""
    found = [wrong(contender, tokens) for contender in made]
    results = torch.zeros(job.ranks * len(tokens.x), tokens.x.shape[1], dtype=tokens.x.dtype, device=job.device)
    times = np.zeros((bursts, len(made), 3))
    for turn in range(-2, bursts):  # the first two bursts are warm-ups
        for which, contender in enumerate(made):
            measured = burst(job, contender, results)
            if turn >= 0:
                times[turn, which] = measured
    job.world.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    median = np.median(times, axis=0)
    return [
        {
            "tokens": len(tokens.x),
            "name": contender.name,
            **dict(zip(("dispatch_us", "combine_us", "issuing_us"), map(float, median[i]), strict=True)),
            "wrong": job.world.allreduce(found[i] + wrong(contender, tokens)),
        }
        for i, contender in enumerate(made)
    ]


def main() -> int:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=options.count, nargs="+", default=[128, 4096], help="of each rank")
    parser.add_argument("--hidden", type=options.count, default=7168, help="(default %(default)s)")
    parser.add_argument("--topk", type=options.count, default=8, help="(default %(default)s)")
    parser.add_argument("--experts", type=options.count, default=256, help="of all ranks (default %(default)s)")
    parsed = parser.parse_args()
    bursts = 5 if parsed.quick else 15
    method = f"bfloat16, {_SMS} SMs, bursts of {_PAIRS} pairs, median of {bursts}, slowest rank"
    rows: list[Fields] = []
    with GpuJob(parsed.seconds) as job:
        job.heading("deep_ep.Buffer", f"hidden {parsed.hidden}, top {parsed.topk} of {parsed.experts}; {method}")
        table = Table(_COLUMNS)
        if job.first:
            table.header()
        buffer = Buffer(job.comm, explicitly_destroy=True)
        for count in parsed.tokens:
            sizes = (count, parsed.hidden, parsed.topk, job.rank, parsed.experts, job.comm.local_world_size, job.ranks)
            layer = EPAll2AllLayer(
                job.comm,
                *sizes,
                num_sm=_SMS,
                layout="rank",
                enable_local_combine=True,
                max_recv_tokens=job.ranks * count,
            )
            tokens = Tokens.random(job, count, parsed.hidden, parsed.topk, parsed.experts)
            of_count = measure(job, contenders(job, buffer, layer, tokens, parsed.experts), tokens, bursts)
            rows += of_count
            if job.first:
                for row in of_count:
                    table.row(*row.values())
            layer.finalize()
        buffer.destroy()
        if job.first:
            sizes_of = {"hidden": parsed.hidden, "topk": parsed.topk, "experts": parsed.experts, "method": method}
            job.write(parsed.json, {"benchmark": "deep_ep_buffer", **sizes_of, "results": rows})
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
