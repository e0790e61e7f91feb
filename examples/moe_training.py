"""Trains a transformer of 8 layers with PyTorch. Each layer has a mixture of experts, which are on different ranks.

    torchrun --nproc-per-node 4 examples/moe_training.py                # dense parts by DistributedDataParallel
    torchrun --nproc-per-node 4 examples/moe_training.py --dense fsdp   # or by FSDP2
    torchrun --nproc-per-node 4 examples/moe_training.py --captured     # whole steps as CUDA graphs, on GPUs

The model is trained twice, with the same weights and data. In one training, `EPAll2AllLayer` sends tokens to their
experts, and the backend `proxyccl` reduces the dense parts' gradients; in the other, torch's own backend does both
(`experts_by_all_to_all.py`). The two trainings alternate, always with the same batch. The losses of both trainings must
agree and fall, and all ranks must end with the same dense weights. If there is a GPU for each rank, the training runs
on GPUs in bfloat16; otherwise a small model is trained on CPUs in float32.

An expert gets tokens of all ranks, so its gradient is a sum over ranks, whereas the dense parts' gradients are averages
over ranks. The optimizer therefore divides the experts' gradients by the number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  torch's convention
from experts_by_all_to_all import AllToAll, aligned
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import proxyccl.torch  # noqa: F401  torch 2.15 and later find the backend without this line
from proxyccl import EPAll2AllLayer

grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm  # older versions of torch have `_grouped_mm`

LAYERS, VOCABULARY = 8, 256
WARM_UP = 11  # The number of warm-up steps that DistributedDataParallel needs before a capture.
ALIGNMENT = 8  # Alignment of an expert's first row, in rows; grouped_mm needs 16 bytes.
ROOM = 2  # In captured steps, outputs have room for this multiple of the rows of an even routing.
MOMENTUM = 0.9
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # largest allowed difference of the losses / first loss


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of its batches.

    Attributes:
        hidden: number of elements of a token.
        inner: number of hidden elements of an expert, between its two matrices.
        heads: number of the attention's heads.
        experts: number of experts in each layer, of all ranks together.
        topk: number of experts that a token chooses.
        sequences, length: number and length of the sequences in a rank's batch.
        steps: number of steps that are timed together.
        turns: number of times that each of the two trainings is timed.
    """

    hidden: int
    inner: int
    heads: int
    experts: int
    topk: int
    sequences: int
    length: int
    steps: int
    turns: int

    @property
    def tokens(self) -> int:
        """Tokens of a rank's batch."""
        return self.sequences * self.length


ON_GPUS = Sizes(2048, 1024, 16, 32, 4, 4, 1024, steps=10, turns=4)
ON_CPUS = Sizes(32, 32, 2, 8, 2, 2, 16, steps=2, turns=2)


class Exchange(Protocol):
    """Brings tokens to their experts and back, with gradients."""

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Sends tokens.

        Args:
            x: the tokens, [T, hidden].
            ids: the experts of each token, [T, topk].
            weights: the experts' weights, float32 [T, topk].

        Returns:
            The rows of this rank's experts, ordered by expert; the end of each expert's rows, int32; and a state for
            `combine`.
        """
        ...

    def combine(self, rows: Tensor, state: Any) -> Tensor:
        """Sends the experts' rows back. Returns the weighted sum of each token's rows, [T, hidden]."""
        ...

    def check(self) -> None:
        """Raises an error if some rows did not fit into a fixed number of rows."""
        ...

    def close(self) -> None:
        """Frees its memory. All ranks make this call together."""
        ...


class ByProxyCCL:
    """See `Exchange`. All layers of the model share one `EPAll2AllLayer`, because any number of dispatches can precede
    their combines.

    If calls are captured in a graph, outputs have a fixed number of rows, and the CPU does not wait.
    """

    def __init__(self, group: Any, sizes: Sizes, dtype: torch.dtype, *, captured: bool) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        local = sizes.experts // ranks
        self._own = slice(rank * local, (rank + 1) * local)
        self._layer = EPAll2AllLayer(
            group,  # the group only connects the layer's ranks, and moves no tokens
            sizes.tokens,
            sizes.hidden,
            sizes.topk,
            rank,
            sizes.experts,
            int(os.environ["LOCAL_WORLD_SIZE"]),
            ranks,
            dtype=dtype,
            expert_alignment=ALIGNMENT,
            max_recv_tokens=ROOM * sizes.tokens * sizes.topk + local * ALIGNMENT if captured else None,
        )

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Any]:
        """See `Exchange`."""
        rows, row_weights, desc = self._layer.dispatch(x, ids.int(), weights)
        ends = aligned(desc.counts[:, self._own].sum(0), ALIGNMENT).cumsum(0, dtype=torch.int32)
        return rows, ends, (row_weights, desc)

    def combine(self, rows: Tensor, state: Any) -> Tensor:
        """See `Exchange`."""
        row_weights, desc = state
        made: Tensor = self._layer.combine(rows, desc, weights=row_weights)
        return made

    def check(self) -> None:
        """See `Exchange`."""
        self._layer.check()

    def close(self) -> None:
        """See `Exchange`."""
        self._layer.finalize()


class Experts(nn.Module):
    """A rank's experts of one layer. Each expert has two matrices. Every rank passes a different seed."""

    def __init__(self, experts: int, hidden: int, inner: int, seed: int) -> None:
        super().__init__()
        own = torch.Generator(torch.get_default_device()).manual_seed(seed)
        self.up = nn.Parameter(torch.randn(experts, hidden, inner, generator=own) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, hidden, generator=own) * inner**-0.5)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Returns the experts' results. Rows past the last end are undefined."""
        return grouped_mm(F.silu(grouped_mm(rows, self.up, offs=ends)), self.down, offs=ends)


class Mixture(nn.Module):
    """A mixture of experts: router, experts on all ranks, and the weighted sum of the experts' results."""

    def __init__(self, sizes: Sizes, local_experts: int, exchange: Exchange, seed: int) -> None:
        super().__init__()
        self.router = nn.Linear(sizes.hidden, sizes.experts, bias=False)
        self.experts = Experts(local_experts, sizes.hidden, sizes.inner, seed)
        self._exchange, self._topk = exchange, sizes.topk

    def forward(self, x: Tensor) -> Tensor:
        """Computes results [T, hidden] from tokens [T, hidden]."""
        weights, ids = self.router(x).float().softmax(dim=1).topk(self._topk, dim=1)
        rows, ends, state = self._exchange.dispatch(x, ids, weights / weights.sum(dim=1, keepdim=True))
        return self._exchange.combine(self.experts(rows, ends), state)


class Block(nn.Module):
    """A transformer's layer."""

    def __init__(self, sizes: Sizes, local_experts: int, exchange: Exchange, seed: int) -> None:
        super().__init__()
        self._heads = sizes.heads
        self.before, self.after = nn.LayerNorm(sizes.hidden), nn.LayerNorm(sizes.hidden)
        self.qkv = nn.Linear(sizes.hidden, 3 * sizes.hidden, bias=False)
        self.out = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.mixture = Mixture(sizes, local_experts, exchange, seed)

    def forward(self, x: Tensor) -> Tensor:
        """Computes results from tokens, both [sequences, length, hidden]."""
        heads = self.qkv(self.before(x)).unflatten(2, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.mixture(self.after(x).flatten(0, 1)).view_as(x)


class Model(nn.Module):
    """Predicts each token's successor. All ranks have the same dense weights, but different experts."""

    def __init__(self, sizes: Sizes, rank: int, ranks: int, exchange: Exchange) -> None:
        super().__init__()
        torch.manual_seed(1)
        seeds, local_experts = range(1 + rank * LAYERS, 1 + (rank + 1) * LAYERS), sizes.experts // ranks
        self.embedding = nn.Embedding(VOCABULARY, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes, local_experts, exchange, seed) for seed in seeds)
        self.head = nn.Linear(sizes.hidden, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        """Returns the loss of sequences of ids, [sequences, length + 1]."""
        x = self.embedding(ids[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), ids[:, 1:].flatten())


@dataclass(frozen=True)
class Where:
    """Where trainings run.

    Attributes:
        device: this rank's device.
        dtype: the element type of all weights.
        dense: the wrapper of the dense parts: "ddp" or "fsdp".
    """

    device: torch.device
    dtype: torch.dtype
    dense: str


class Training:
    """A training of the model with one backend.

    Attributes:
        losses: the losses of all steps, on this rank's data.
        seconds: for each turn, the time of a step, and the part of that time in which the CPU issued the step.
    """

    def __init__(self, name: str, group: Any, exchange: Exchange, sizes: Sizes, where: Where) -> None:
        self.name, self._exchange, self._device = name, exchange, where.device
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        with where.device:
            model = Model(sizes, rank, ranks, exchange).to(where.dtype)
        own = {key for key, _ in model.named_parameters() if ".experts." in key}
        if where.dense == "ddp":
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
            self._model: nn.Module = DistributedDataParallel(model, process_group=group)
        else:
            mesh = DeviceMesh.from_group(group, where.device.type)
            ignored = {parameter for key, parameter in model.named_parameters() if key in own}
            for block in model.blocks:
                fully_shard(block, mesh=mesh, ignored_params=ignored)
            self._model = fully_shard(model, mesh=mesh, ignored_params=ignored)
        parameters = dict(model.named_parameters())
        self._dense = [parameter for key, parameter in parameters.items() if key not in own]
        rate = 0.02
        groups = [
            {"params": self._dense, "lr": rate},
            {"params": [parameters[key] for key in own], "lr": rate / ranks},
        ]
        self._optimizer = torch.optim.SGD(groups, momentum=MOMENTUM)
        self._graph: Any = None
        self._loss = torch.zeros((), device=where.device)
        self.losses: list[Tensor] = []
        self.seconds: list[tuple[float, float]] = []

    def _step(self, ids: Tensor) -> Tensor:
        loss: Tensor = self._model(ids)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def capture(self, ids: Tensor, stream: Any) -> None:
        """Captures a step in a graph, which later steps replay. The later steps must use the same tensor of ids. The
        current stream must be the stream on which the training was made.
        """
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._step(ids)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Threads of the process groups call the driver during the capture, so the mode must be "thread_local".
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._loss = self._step(ids)
        self._graph = graph

    def turn(self, ids: Tensor, steps: int) -> None:
        """Trains for some steps, and records their time and losses."""
        _synchronize(self._device)
        dist.barrier()
        _synchronize(self._device)
        start = time.perf_counter()
        for _ in range(steps):
            if self._graph is None:
                self.losses.append(self._step(ids))
            else:
                self._graph.replay()
                self.losses.append(self._loss.clone())
        issued = time.perf_counter() - start
        _synchronize(self._device)
        self.seconds.append(((time.perf_counter() - start) / steps, issued / steps))
        self._exchange.check()

    def differing(self) -> int:
        """Returns the number of dense weights that differ from rank 0's."""
        wrong = 0
        for parameter in self._dense:
            own = parameter.detach()
            if isinstance(own, DTensor):
                continue  # FSDP2's weights are skipped, because each element is on one rank only
            first = own.clone()
            dist.broadcast(first, 0)
            wrong += int((first != own).sum())
        return wrong

    def close(self) -> None:
        """Frees the graph and the exchange."""
        self._graph = None
        self._exchange.close()


@dataclass(frozen=True)
class Result:
    """The measurements of one training. Each value is the median over turns of the slowest rank's value.

    Attributes:
        tokens_per_second: tokens per second of all ranks together.
        cpu_share: part of a step's time in which the CPU issued the step; 1 without GPUs.
        losses: for each step, the mean loss of all ranks.
    """

    name: str
    captured: bool
    step_ms: float
    tokens_per_second: float
    cpu_share: float
    losses: list[float]


def result_of(training: Training, sizes: Sizes, *, captured: bool) -> Result:
    """Returns the result of a training. All ranks make this call together."""
    figures = torch.tensor(training.seconds[1:], dtype=torch.float64)  # the first turn is a warm-up
    losses = torch.stack(training.losses).double().cpu()
    everyones = [torch.zeros_like(figures) for _ in range(dist.get_world_size())]
    _gather(everyones, figures)
    slowest = torch.stack(everyones).amax(dim=0).tolist()
    all_losses = [torch.zeros_like(losses) for _ in everyones]
    _gather(all_losses, losses)
    step, issue = (statistics.median(column) for column in zip(*slowest, strict=True))
    mean = torch.stack(all_losses).mean(dim=0).tolist()
    tokens = sizes.tokens * len(everyones)
    return Result(training.name, captured, step * 1e3, tokens / step, min(1.0, issue / step), mean)


def _gather(outputs: list[Tensor], x: Tensor) -> None:
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    moved = [each.to(device) for each in outputs]
    dist.all_gather(moved, x.to(device))
    for output, each in zip(outputs, moved, strict=True):
        output.copy_(each)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def batch_of(sizes: Sizes, rank: int, device: torch.device) -> Tensor:
    """Returns a rank's sequences, [sequences, length + 1]. In a sequence, each id is a function of the previous id."""
    ids = torch.randint(VOCABULARY, (sizes.sequences, 1), generator=torch.Generator().manual_seed(rank))
    for _ in range(sizes.length):
        ids = torch.cat([ids, (5 * ids[:, -1:] + 7) % VOCABULARY], dim=1)
    return ids.to(device)


def measure(sizes: Sizes, where: Where, *, captured: bool) -> list[Result]:
    """Trains with both backends alternately. Returns the results. All ranks make this call together."""
    peer = dist.group.WORLD
    ours = dist.new_group(backend="proxyccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    fixed = ROOM * sizes.tokens * sizes.topk // ranks if captured else None
    ways = {
        "proxyccl": (ours, ByProxyCCL(peer, sizes, where.dtype, captured=captured)),
        dist.get_backend(): (peer, AllToAll(peer, sizes.experts, ALIGNMENT, rows_for_each_rank=fixed)),
    }
    ids = batch_of(sizes, rank, where.device)
    stream = torch.cuda.Stream() if captured else None
    trainings = []
    for name, (group, exchange) in ways.items():
        with torch.cuda.stream(stream):
            training = Training(name, group, exchange, sizes, where)
        if captured:
            training.capture(ids, stream)
        trainings.append(training)
    for _ in range(1 + sizes.turns):
        for training in trainings:
            training.turn(ids, sizes.steps)
    results = [result_of(training, sizes, captured=captured) for training in trainings]
    for training in trainings:
        wrong = training.differing()
        assert wrong == 0, f"{training.name}: {wrong} dense weights differ between ranks"
        training.close()
    return results


def require_alike(results: list[Result], dtype: torch.dtype) -> None:
    """Raises AssertionError if the two trainings' losses differ, or do not fall."""
    first = results[0].losses[0]
    for a, b in zip(results[0].losses, results[1].losses, strict=True):
        assert abs(a - b) <= TOLERANCES[dtype] * first, f"losses differ: {results}"
    assert all(result.losses[-1] < result.losses[0] for result in results), f"losses do not fall: {results}"


def report(result: Result, *, as_json: bool) -> None:
    """Prints a result."""
    how = "captured" if result.captured else "eager"
    print(
        f"{result.name:9} {how:8} step {result.step_ms:8.2f} ms, CPU {result.cpu_share:4.0%} of it; "
        f"{result.tokens_per_second:10,.0f} tokens a second; loss {result.losses[0]:.4f} to {result.losses[-1]:.4f}",
        flush=True,
    )
    if as_json:
        print("RESULT", json.dumps(asdict(result)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a mixture of experts with PyTorch, in two ways.")
    parser.add_argument("--dense", choices=("ddp", "fsdp"), default="ddp", help="default %(default)s")
    parser.add_argument("--captured", action="store_true", help="replay whole steps as CUDA graphs")
    parser.add_argument("--tokens", type=int, help="of a rank's batch; a multiple of the sequences' length")
    parser.add_argument("--steps", type=int, help="that are timed together")
    parser.add_argument("--json", action="store_true", help="also print the results for programs")
    options = parser.parse_args()

    local_rank = int(os.environ["LOCAL_RANK"])
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local_rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    elif options.captured:
        raise SystemExit("--captured needs a GPU for each rank")
    where = Where(device, torch.bfloat16 if on_gpus else torch.float32, options.dense)
    sizes = ON_GPUS if on_gpus else ON_CPUS
    tokens, steps = options.tokens or sizes.tokens, options.steps or sizes.steps
    sizes = Sizes(**{**asdict(sizes), "sequences": tokens // sizes.length, "steps": steps})
    dist.init_process_group("nccl" if on_gpus else "gloo")
    if sizes.experts % dist.get_world_size():
        raise SystemExit(f"{sizes.experts} experts can't be shared by {dist.get_world_size()} ranks")

    results = measure(sizes, where, captured=options.captured)
    if dist.get_rank() == 0:
        for result in results:
            report(result, as_json=options.json)
        require_alike(results, where.dtype)
        ratio = results[0].tokens_per_second / results[1].tokens_per_second
        print(f"OK: {dist.get_world_size()} ranks on {device.type}: {ratio:.2f} times the tokens of {results[1].name}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
