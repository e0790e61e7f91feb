"""Measures single calls for `programs.py`: the CPU's time to issue calls, and CUDA graphs of a few calls by proxy.

Each function measures a part with `Ranks` and reports its rows. The CPU's share is the time to issue a call, divided by
the time until the device has finished.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from programs_ranks import OURS, Figure, Ranks, Variant
from torch_calls import issue_calls, nothing_group

from proxyccl import EPAll2AllLayer
from proxyccl.deep_ep import Buffer
from proxyccl.tools.options import show_size

_COUNT = 256  # Few elements per call, so that kernels are short.
_BURST, _BURSTS = 50, 10  # A burst of calls fits into a stream's queue.
_PAIR_BURST = 20
_GRAPH_CALLS, _REPLAYS = 4, 30
_GRAPH_BYTES = (8 << 10, 16 << 10, 32 << 10)


def issue_and_whole(ranks: Ranks, calls: dict[str, Callable[[], object]], burst: int, bursts: int) -> dict[str, Figure]:
    """Returns the slowest rank's time to issue a call, in µs, for each contender."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for turn in range(-2, bursts):  # the first two are warm-ups
        for name, call in calls.items():
            ranks.meet()
            start = time.perf_counter()
            for _ in range(burst):
                call()
            issued = time.perf_counter() - start
            ranks.synchronize()
            if turn >= 0:
                times[name].append((issued / burst * 1e6, (time.perf_counter() - start) / burst * 1e6))
    found = {}
    for name, taken in times.items():
        issue, whole = ranks.slowest(*(statistics.median(column) for column in zip(*taken, strict=True)))
        found[name] = Figure(issue, min(1.0, issue / whole))
    return found


def measure_issue(ranks: Ranks, *, quick: bool) -> None:
    """Measures the time to issue torch's calls, calls of a group that does nothing, and `Communicator.all_reduce`."""
    bursts = 2 if quick else _BURSTS
    groups = {OURS: ranks.group_of_ours(Variant(OURS)), ranks.peer: dist.group.WORLD, "nothing": nothing_group()}
    calls = {name: issue_calls(group, ranks.device) for name, group in groups.items() if group is not None}
    for what in calls[OURS]:
        found = issue_and_whole(ranks, {name: of_it[what] for name, of_it in calls.items()}, _BURST, bursts)
        ranks.report("torch.distributed", f"issue, {what}", "µs", found)
    x = ranks.ones(_COUNT)
    with ranks.communicator() as comm:
        found = issue_and_whole(ranks, {OURS: lambda: comm.all_reduce(x, "max")}, _BURST, bursts)
    ranks.report("Communicator.all_reduce", "issue", "µs", found)


def measure_experts(ranks: Ranks, *, quick: bool) -> None:
    """Measures pairs of dispatch and combine without a graph, and in a CUDA graph, where the CPU does not limit the
    speed.
    """
    tokens, hidden, topk, experts = (128, 7168, 8, 256) if ranks.on_gpus else (8, 128, 2, 4)
    buffer = Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
    sizes = (tokens, hidden, topk, ranks.rank, experts, ranks.size, ranks.size)
    layer = EPAll2AllLayer(dist.group.WORLD, *sizes, layout="padded", minus_one_drops=True)
    x = ranks.ones(tokens * hidden, torch.bfloat16).view(tokens, hidden)
    ids = torch.rand(tokens, experts, device=ranks.device).topk(topk, dim=1).indices
    weights = ranks.ones(tokens * topk).view(tokens, topk)
    results = x.new_ones(experts // ranks.size, ranks.size * tokens, hidden)  # the experts' results

    def low_latency() -> torch.Tensor:
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, tokens, experts, use_fp8=False)
        combined, _, _ = buffer.low_latency_combine(rows, ids, weights, handle)
        return combined

    def in_float8() -> torch.Tensor:
        _, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, tokens, experts, use_fp8=True)
        combined, _, _ = buffer.low_latency_combine(results, ids, weights, handle)
        return combined

    def by_layer() -> torch.Tensor:
        rows, _, desc = layer.dispatch(x, ids)
        combined: torch.Tensor = layer.combine(rows, desc, topk_weights=weights)
        return combined

    pairs = {"deep_ep low latency": low_latency, "deep_ep low latency, float8": in_float8, "EPAll2AllLayer": by_layer}
    for name, pair in pairs.items():
        wrong = int((pair() != topk).sum())
        if wrong:
            raise SystemExit(f"{wrong} elements that a pair of {name} combines are wrong")
        _measure_pair(ranks, f"{name}, {tokens} tokens", pair, 2 if quick else _BURSTS)
    layer.finalize()
    buffer.destroy()


def _measure_pair(ranks: Ranks, program: str, pair: Callable[[], object], bursts: int) -> None:
    found = issue_and_whole(ranks, {OURS: pair}, _PAIR_BURST, bursts)[OURS]
    ranks.report(program, "issue of a pair", "µs", {OURS: found})
    ranks.report(program, "dispatch and combine", "µs", {OURS: _whole(found, 1)})
    if ranks.on_gpus:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(_PAIR_BURST):
                pair()
        name = f"{OURS}, captured"
        replayed = issue_and_whole(ranks, {name: graph.replay}, 1, bursts)[name]
        ranks.report(program, "dispatch and combine", "µs", {name: _whole(replayed, _PAIR_BURST)})


def _whole(issue: Figure, pairs: int) -> Figure:
    assert issue.cpu_share is not None
    return Figure(issue.value / issue.cpu_share / pairs, issue.cpu_share)


def measure_proxied_graphs(ranks: Ranks, *, quick: bool) -> None:
    """Measures an all_reduce by proxy, in a graph of a few calls or, on CPUs, without a graph."""
    with ranks.communicator() as comm:
        for nbytes in _GRAPH_BYTES:
            array = comm.empty(nbytes // 4, "float32").fill(1)
            comm.register(array)
            x = torch.from_dlpack(array)
            ways: dict[str, Callable[[], object]] = {
                OURS: lambda x=x: comm.all_reduce(x, "max", algorithm="proxy"),  # type: ignore[misc]
                ranks.peer: lambda x=x: dist.all_reduce(x, dist.ReduceOp.MAX),  # type: ignore[misc]
            }
            found = {name: Figure(_per_call(ranks, call, 2 if quick else _REPLAYS)) for name, call in ways.items()}
            ranks.report(f"all_reduce by proxy, a graph of {_GRAPH_CALLS} calls", show_size(nbytes), "µs", found)
        comm.check()


def _per_call(ranks: Ranks, call: Callable[[], object], replays: int) -> float:
    queue: Callable[[], object] = lambda: [call() for _ in range(_GRAPH_CALLS)]  # noqa: E731
    if ranks.on_gpus:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            queue()  # this call creates caches
        ranks.meet()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            queue()
        queue = graph.replay
    times = []
    for replay in range(-2, replays):  # the first two are warm-ups
        ranks.meet()
        start = time.perf_counter()
        queue()
        ranks.synchronize()
        if replay >= 0:
            times.append((time.perf_counter() - start) * 1e6 / _GRAPH_CALLS)
    (slowest,) = ranks.slowest(statistics.median(times))
    return slowest
