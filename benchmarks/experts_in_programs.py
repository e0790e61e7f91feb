"""Experts' calls as a program makes them: not captured, one after the other. For a program that has a `GpuJob`.

    rows = measure_experts(job)

- low latency: a pair of `Buffer.low_latency_dispatch` and `low_latency_combine`, in bfloat16 and in float8
- normal mode: a pair of `Buffer.dispatch` and `combine`, with outputs of the exact size and with `num_worst_tokens`
- layer: a pair of `EPAll2AllLayer.dispatch` and `combine` of a fixed number of rows

Times are means over a burst of pairs, medians over bursts, of the slowest rank. `pair_us` is the time of a pair, from
the first call of a burst until the GPU is done; `issuing_us` the issuing thread's processor time of a pair, in which it
polls for exact sizes; `apart_us` that thread's time of a pair that is issued to an idle GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from gpu_job import GpuJob
from mpi4py import MPI

from proxyccl import EPAll2AllLayer
from proxyccl.deep_ep import Buffer
from proxyccl.tools.results import Fields

_PAIRS, _HIDDEN, _TOPK, _EXPERTS = 20, 7168, 8, 256
Pair = Callable[[], object]


def measure_experts(job: GpuJob, bursts: int = 15, few: int = 128, many: int = 4096) -> list[Fields]:
    """A row for each kind of pair, the same on all ranks: its name, tokens, `pair_us`, `issuing_us` and `apart_us`."""
    buffer = Buffer(job.comm, explicitly_destroy=True)
    sizes = (few, _HIDDEN, _TOPK, job.rank, _EXPERTS, job.comm.local_world_size, job.ranks)
    layer = EPAll2AllLayer(job.comm, *sizes, num_sm=Buffer.num_sms, layout="padded", minus_one_drops=True)
    pairs = [
        ("low latency", few, _low_latency(job, buffer, few, use_fp8=False)),
        ("low latency, float8", few, _low_latency(job, buffer, few, use_fp8=True)),
        ("normal, exact", many, _normal(job, buffer, many, worst=0)),
        ("normal, num_worst_tokens", many, _normal(job, buffer, many, worst=job.ranks * many)),
        ("layer, padded", few, _layer(job, layer, few)),
    ]
    times = np.zeros((bursts, len(pairs), 3))
    for turn in range(-2, bursts):  # the first two warm up
        for which, (_, _, pair) in enumerate(pairs):
            measured = (*_burst(job, pair), _apart(job, pair))
            if turn >= 0:
                times[turn, which] = measured
    job.world.Allreduce(MPI.IN_PLACE, times, MPI.MAX)
    median = np.median(times, axis=0)
    layer.finalize()
    buffer.destroy()
    names = ("pair_us", "issuing_us", "apart_us")
    return [
        {"call": name, "tokens": tokens, **dict(zip(names, map(float, median[which]), strict=True))}
        for which, (name, tokens, _) in enumerate(pairs)
    ]


def _burst(job: GpuJob, pair: Pair) -> tuple[float, float]:
    torch.cuda.synchronize()
    job.world.Barrier()
    start, used = time.perf_counter(), time.thread_time()
    for _ in range(_PAIRS):
        pair()
    issuing = time.thread_time() - used
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6 / _PAIRS, issuing * 1e6 / _PAIRS


def _apart(job: GpuJob, pair: Pair) -> float:
    issuing = 0.0
    for _ in range(_PAIRS):
        torch.cuda.synchronize()
        job.world.Barrier()
        start = time.perf_counter()
        pair()
        issuing += time.perf_counter() - start
    return issuing * 1e6 / _PAIRS


def _tokens(job: GpuJob, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = job.random(count * _HIDDEN, "bfloat16", job.rank).view(count, _HIDDEN)
    ids = torch.rand(count, _EXPERTS, device=job.device).topk(_TOPK, dim=1).indices
    return x, ids, torch.ones_like(ids, dtype=torch.float32)


def _low_latency(job: GpuJob, buffer: Buffer, count: int, *, use_fp8: bool) -> Pair:
    x, ids, weights = _tokens(job, count)
    results = x.new_zeros(_EXPERTS // job.ranks, job.ranks * count, _HIDDEN)

    def pair() -> object:
        _, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, count, _EXPERTS, use_fp8=use_fp8)
        return buffer.low_latency_combine(results, ids, weights, handle)

    return pair


def _normal(job: GpuJob, buffer: Buffer, count: int, *, worst: int) -> Pair:
    x, ids, weights = _tokens(job, count)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, _EXPERTS)

    def pair() -> object:
        rows, _, _, _, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
            num_worst_tokens=worst,
        )
        return buffer.combine(rows, handle)

    return pair


def _layer(job: GpuJob, layer: EPAll2AllLayer, count: int) -> Pair:
    x, ids, weights = _tokens(job, count)
    results = x.new_zeros(_EXPERTS // job.ranks, job.ranks * count, _HIDDEN)

    def pair() -> object:
        _, _, desc = layer.dispatch(x, ids)
        return layer.combine(results, desc, topk_weights=weights)

    return pair
