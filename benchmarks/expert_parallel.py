"""MoE dispatch and combine compared with NCCL's all_to_all_single: mpiexec -n 4 python -m mpi4py expert_parallel.py

Every token chooses `--topk` different experts at random. A size is the number of bytes that one rank sends to others,
if the rank sends each token once to each rank that has one of the token's experts. NCCL moves as many bytes; NCCL's
times exclude packing and unpacking. ProxyCCL's times include counting rows and ordering the output by expert. Outputs
have room for the largest number of rows that any rank receives, so the CPU need not wait for the number of rows.
gpu_job.py says how times are measured.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from gpu_job import GpuJob, poison
from program import common_arguments
from side_by_side import COLUMNS, DTYPES, Case, Contender, Job, differing, fresh_seed, random_inputs, show

from proxyccl import EPAll2AllLayer
from proxyccl.tools import options
from proxyccl.tools.results import Fields
from proxyccl.tools.tables import Table


@dataclass(frozen=True)
class Routing:
    """A rank's tokens, and the expected result of their dispatch.

    Attributes:
        tokens: this rank's tokens, [count, hidden].
        expert_ids: the experts of each of this rank's tokens, [count, topk].
        rows: for each layout, the rows that this rank receives, [R, hidden].
        most_rows: for each layout, the largest number of rows that any rank receives.
        visits: for each of this rank's tokens, the number of ranks that have one of its experts, [count, 1].
        crossing: for each rank, the number of tokens that this rank sends to that rank; 0 for itself.
        arriving: for each rank, the number of tokens that this rank receives from that rank.
    """

    tokens: torch.Tensor
    expert_ids: torch.Tensor
    rows: dict[str, torch.Tensor]
    most_rows: dict[str, int]
    visits: torch.Tensor
    crossing: list[int]
    arriving: list[int]

    @classmethod
    def random(cls, job: Job, count: int, hidden: int, topk: int, experts: int, dtype: str) -> Routing:
        """Returns a new random routing, the same on all ranks."""
        seed, per_rank = fresh_seed(job), experts // job.ranks
        tokens = [torch.as_tensor(x).view(count, hidden) for x in random_inputs(job, count * hidden, dtype, seed)]
        ids = []
        for rank in range(job.ranks):
            generator = torch.Generator(job.device).manual_seed(seed + job.ranks + rank)
            scores = torch.rand(count, experts, generator=generator, device=job.device)
            ids.append(scores.topk(topk, dim=1).indices.to(torch.int32))
        every = torch.stack(ids)  # [ranks, count, topk]
        of_slots = every // per_rank
        comes = torch.stack([(of_slots == rank).any(2) for rank in range(job.ranks)])  # [ranks, ranks, count]
        here = of_slots == job.rank
        order = torch.argsort(every[here], stable=True)
        sources = here.nonzero()[order]
        both = torch.stack(tokens)
        rows = {"expert": both[sources[:, 0], sources[:, 1]], "rank": both[comes[job.rank]]}
        most = {
            "expert": max(int((of_slots == rank).sum()) for rank in range(job.ranks)),
            "rank": int(comes.sum((1, 2)).max()),
        }
        visits = comes[:, job.rank].sum(0).to(rows["rank"].dtype)[:, None]
        goes = [[int(comes[to, source].sum()) for to in range(job.ranks)] for source in range(job.ranks)]
        for rank in range(job.ranks):
            goes[rank][rank] = 0
        mine = job.rank
        return cls(tokens[mine], ids[mine], rows, most, visits, goes[mine], [goes[s][mine] for s in range(job.ranks)])


def contenders(job: Job, routing: Routing, layers: dict[str, EPAll2AllLayer], peer: str = "NCCL") -> list[Contender]:
    """Returns our contenders (for each layer a dispatch, a combine and both), then the contenders of torch's default
    group, which moves the same bytes to the experts and back.
    """
    stream, topk = job.handle, routing.expert_ids.shape[1]
    hidden, dtype = routing.tokens.shape[1], routing.tokens.dtype
    # Each expert returns its rows unchanged. If a token is sent once per rank, each rank that has one of the token's
    # experts returns the token.
    sums = {"expert": routing.tokens * topk, "rank": routing.tokens * routing.visits}
    found: list[Contender] = []

    def ours(name: str, layer: EPAll2AllLayer) -> list[Contender]:
        state: dict[str, Any] = {}
        combined = torch.empty_like(routing.tokens)
        expected, summed = routing.rows[layer.layout], sums[layer.layout]

        def dispatch() -> None:
            state["rows"], _, state["desc"] = layer.dispatch(routing.tokens, routing.expert_ids, stream=stream)

        def wrong_rows() -> int:
            return differing(state["rows"][: len(expected)], expected)

        def poison_rows() -> None:
            if "rows" in state:
                poison(state["rows"])

        def combine() -> None:
            layer.combine(state["given"], state["kept"], out=combined, stream=stream)

        def prepare_combine() -> None:
            if "given" not in state:
                rows, _, kept = layer.dispatch(routing.tokens, routing.expert_ids, stream=stream)
                job.synchronize()  # the stream does not order a copy to the CPU, so the CPU waits
                state.update(given=layer.combine_input(kept).copy_(rows), kept=kept)
            poison(combined)

        def pair() -> None:
            rows, _, desc = layer.dispatch(routing.tokens, routing.expert_ids, stream=stream)
            layer.combine(rows, desc, out=combined, stream=stream)

        return [
            Contender(f"dispatch, {name}", True, dispatch, poison_rows, lambda _: wrong_rows()),
            Contender(f"combine, {name}", True, combine, prepare_combine, lambda _: differing(combined, summed)),
            Contender(f"both, {name}", True, pair, lambda: poison(combined), lambda _: differing(combined, summed)),
        ]

    def in_float8(name: str, layer: EPAll2AllLayer) -> Contender:
        state: dict[str, Any] = {}
        rows = routing.rows[layer.layout]
        blocks = rows.float().view(len(rows), hidden // 128, 128)
        expected = (
            (blocks * (448 / blocks.abs().amax(-1, keepdim=True)))
            .to(torch.float8_e4m3fn)
            .view(len(rows), hidden)
            .view(torch.uint8)
        )

        def dispatch() -> None:
            (state["rows"], _), _, _ = layer.dispatch(routing.tokens, routing.expert_ids, stream=stream)

        def wrong() -> int:
            return differing(state["rows"].view(torch.uint8)[: len(expected)], expected)

        return Contender(
            f"dispatch, {name}", True, dispatch, lambda: "rows" in state and poison(state["rows"]), lambda _: wrong()
        )

    for name, layer in layers.items():
        found += [in_float8(name, layer)] if layer.quantized else ours(name, layer)

    out, back = ([*routing.crossing], [*routing.arriving])
    sent = torch.ones(sum(out), hidden, dtype=dtype, device=job.device)
    came = torch.empty(sum(back), hidden, dtype=dtype, device=job.device)
    for name, source, target, ins, outs in (("there", sent, came, out, back), ("back", came, sent, back, out)):
        found.append(
            Contender(
                f"{peer}, {name}",
                False,
                lambda source=source, target=target, ins=ins, outs=outs: dist.all_to_all_single(
                    target, source, output_split_sizes=outs, input_split_sizes=ins
                ),
                lambda source=source, target=target: (source.fill_(1), poison(target)),
                lambda _, target=target: differing(target, torch.ones_like(target)),
            )
        )
    return found


def main() -> int:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--tokens", type=options.count, nargs="+", default=[128, 4096], help="tokens per rank (default 128 4096)"
    )
    parser.add_argument("--hidden", type=options.count, default=7168, help="elements of a token (default %(default)s)")
    parser.add_argument("--topk", type=options.count, default=8, help="experts of each token (default %(default)s)")
    parser.add_argument("--experts", type=options.count, default=256, help="of all ranks (default %(default)s)")
    parser.add_argument("-d", "--dtype", choices=DTYPES, default="bfloat16", help="of tokens (default %(default)s)")
    parser.add_argument(
        "--num-sm", type=options.count, nargs="+", default=[24], help="most blocks of a kernel (default 24)"
    )
    parser.add_argument("-r", "--repeats", type=options.count, default=15, help="replays (default %(default)s)")
    parsed = parser.parse_args()
    rows: list[Fields] = []
    skipped: list[str] = []
    with GpuJob(parsed.seconds) as job:
        job.heading(
            "dispatch and combine",
            f"hidden {parsed.hidden}, top {parsed.topk} of {parsed.experts} experts; CUDA-graph replays, time of one "
            f"call; median of {parsed.repeats}, maximum over ranks; algbw counts what crosses the link",
        )
        table = Table(COLUMNS)
        if job.first:
            table.header()
        dtype = getattr(torch, parsed.dtype)
        for count in parsed.tokens:
            routing = Routing.random(job, count, parsed.hidden, parsed.topk, parsed.experts, parsed.dtype)
            for blocks in parsed.num_sm:
                if not job.in_time():
                    skipped.append(f"{count} tokens, {blocks} SMs")
                    continue
                kinds: dict[str, dict[str, Any]] = {
                    ", local": {"enable_local_combine": True},
                    "": {},
                    ", float8": {"dispatch_dtype": torch.float8_e4m3fn},
                    ", a row a rank": {"layout": "rank"},
                    ", a row a rank, float8": {"layout": "rank", "dispatch_dtype": torch.float8_e4m3fn},
                    ", written once": {"layout": "rank", "output_buffers": 2},
                    ", written once, float8": {
                        "layout": "rank",
                        "output_buffers": 2,
                        "dispatch_dtype": torch.float8_e4m3fn,
                    },
                }
                layers = {
                    f"{blocks} SMs{kind}": EPAll2AllLayer(
                        job.comm,
                        count,
                        parsed.hidden,
                        parsed.topk,
                        job.rank,
                        parsed.experts,
                        job.comm.local_world_size,
                        job.ranks,
                        dtype=dtype,
                        num_sm=blocks,
                        max_recv_tokens=routing.most_rows[chosen.get("layout", "expert")],
                        **chosen,
                    )
                    for kind, chosen in kinds.items()
                }
                timings = job.measure(contenders(job, routing, layers), parsed.repeats)
                nbytes = job.world.allreduce(sum(routing.crossing)) // job.ranks * parsed.hidden * dtype.itemsize
                # In float8 an element takes one byte, and 128 elements share a scale of four bytes.
                scaled = nbytes // dtype.itemsize * (128 + 4) // 128
                for size, quantized in ((nbytes, False), (scaled, True)):
                    shown = [timing for timing in timings if timing.name.endswith("float8") is quantized]
                    kind = "float8_e4m3fn" if quantized else parsed.dtype
                    rows += show(job, table, Case(size, count, kind, None, 1.0), shown)
                for layer in layers.values():
                    layer.finalize()
        results: Fields = {
            "benchmark": "expert_parallel",
            "hidden": parsed.hidden,
            "topk": parsed.topk,
            "experts": parsed.experts,
            "method": f"CUDA-graph replay, outputs of a fixed size, median of {parsed.repeats}, maximum over ranks",
        }
        return job.finish(parsed, rows, skipped, results)


if __name__ == "__main__":
    sys.exit(main())
