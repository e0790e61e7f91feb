"""Measures steps of FSDP2 and DDP with our backend and with torch's own backend, for `programs.py`.

The steps of the backends alternate, with the same model and data. A step is timed from a barrier of all ranks until the
device has finished the step; the CPU's share is the part until the CPU has issued the step. With `together`, steps
follow one another without a barrier, as in a real training, so the CPU may issue steps before the device has finished
the previous steps. Before torch 2.15, steps are also measured with a group that does nothing (torch_calls.py), which no
backend can beat.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from programs_ranks import Figure, Ranks, Variant
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_calls import nothing_group

from proxyccl.channels.collectives.table import COLLECTIVES

_PROFILED_STEPS = 3
_LOSSES_DIFFER = 0.05  # allowed difference relative to the loss; bfloat16's rounding error is smaller


@dataclass(frozen=True)
class Case:
    """A model and its batch.

    Attributes:
        name: the case's name on the results page.
        sharded: whether FSDP2 shards the model; otherwise DDP trains it.
        rows: the number of rows of a rank's batch.
        width: the number of the model's features; the matrices of a block are [4 * width, width] and [width, 4 *
            width].
    """

    name: str
    sharded: bool
    dtype: torch.dtype
    rows: int
    width: int
    blocks: int

    def tiny(self) -> Case:
        """Returns a small variant of this case, for CPUs."""
        return Case(f"{self.name}, tiny", self.sharded, self.dtype, 16, 32, 2)


CASES = {
    "fsdp-bf16": Case("FSDP2 step, bfloat16, 8192 tokens", True, torch.bfloat16, 8192, 2048, 8),
    "fsdp-f32": Case("FSDP2 step, float32, 512 rows", True, torch.float32, 512, 2048, 8),
    "ddp-f32": Case("DDP step, float32, 512 rows", False, torch.float32, 512, 2048, 8),
    # This case has 2.1 billion parameters; NCCL's communication takes about as long as the matrix products of 1024
    # tokens.
    "fsdp-half": Case("FSDP2 step, bfloat16, 1024 tokens of 8192 values", True, torch.bfloat16, 1024, 8192, 4),
}


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        grown: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return grown


@dataclass
class Way:
    """One training: the model with one backend or variant.

    Attributes:
        name: the name of the backend or variant.
        seconds: for each step, the time until the device had finished the step, and the time until the step was issued.
        losses: the loss of each step.
    """

    name: str
    model: nn.Module
    optimizer: Any
    seconds: list[tuple[float, float]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, ranks: Ranks, case: Case, name: str, group: Any, *, registered: bool = False) -> Way:
        """Makes the model and its optimizer. All ranks call this together."""
        torch.manual_seed(1)
        with ranks.device:
            blocks = [_Block(case.width) for _ in range(case.blocks)]
            model: Any = nn.Sequential(*blocks, nn.Linear(case.width, 10)).to(case.dtype)
        if case.sharded:
            mesh = DeviceMesh.from_group(group, ranks.device.type)
            for block in model:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            if registered:
                for module in (*model, model):
                    module.set_allocate_memory_from_process_group_for_comm(True)
        else:
            devices = [ranks.device.index] if ranks.on_gpus else None
            # The seed makes the initial weights equal. DDP does not compare them, because a group that does nothing
            # can't.
            model = DistributedDataParallel(model, device_ids=devices, process_group=group, init_sync=False)
        return cls(name, model, torch.optim.SGD(model.parameters(), 1e-2))

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Trains on one batch; returns the loss."""
        loss = nn.functional.cross_entropy(self.model(x).float(), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def turn(self, ranks: Ranks, batch: tuple[Tensor, Tensor], steps: int, *, together: bool) -> None:
        """Trains for some steps, and appends their times and losses."""
        at_once = steps if together else 1
        for _ in range(steps // at_once):
            ranks.meet()
            start = time.perf_counter()
            losses = [self.step(*batch) for _ in range(at_once)]
            issued = time.perf_counter() - start
            ranks.synchronize()
            self.seconds.append(((time.perf_counter() - start) / at_once, issued / at_once))
            self.losses += losses


def communication_ms(ranks: Ranks, way: Way, batch: tuple[Tensor, Tensor]) -> float:
    """Returns the GPU time in ms of a step's communication kernels, including their waits for other ranks."""
    from torch.profiler import ProfilerActivity, profile

    ours = {kernel.name for kernels in COLLECTIVES.values() for kernel in kernels}
    ranks.meet()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(_PROFILED_STEPS):
            way.step(*batch)
        ranks.synchronize()
    spent = sum(
        event.self_device_time_total
        for event in found.key_averages()
        if "nccl" in event.key.lower() or any(event.key.startswith(name) for name in ours)
    )
    return float(spent) / _PROFILED_STEPS / 1e3


def measure(ranks: Ranks, case: Case, variants: list[Variant], *, quick: bool, together: bool) -> None:
    """Measures and reports a case. All ranks call this together."""
    case = case if ranks.on_gpus else case.tiny()
    ways = [
        Way.of(ranks, case, each.name, ranks.group_of_ours(each), registered=each.registered and case.sharded)
        for each in variants
    ]
    ways.append(Way.of(ranks, case, ranks.peer, dist.group.WORLD))
    trained = list(ways)
    if (nothing := nothing_group()) is not None:
        ways.append(Way.of(ranks, case, "nothing", nothing))
    generator = torch.Generator(device=ranks.device).manual_seed(5 + ranks.rank)
    x = torch.randn(case.rows, case.width, device=ranks.device, generator=generator).to(case.dtype)
    batch = x, (x.sum(1) > 0).long()
    steps, turns = (1, 2) if quick else (5, 5)
    for turn in range(-1, turns):
        for way in ways:
            way.turn(ranks, batch, steps, together=together)
            if turn < 0:
                way.seconds.clear()  # the times of the warm-up are discarded
    found = {}
    for way in ways:
        step, issue = (statistics.median(column) for column in zip(*way.seconds, strict=True))
        step, issue = ranks.slowest(step, issue)
        found[way.name] = step, issue
    figures = {name: Figure(step * 1e3, min(1.0, issue / step)) for name, (step, issue) in found.items()}
    what = "a step among others" if together else "a step"
    ranks.report(case.name, what, "ms", figures)
    issues = {name: Figure(issue * 1e3) for name, (_, issue) in found.items()}
    ranks.report(case.name, f"CPU time to issue {what}", "ms", issues)
    _require_alike(trained)
    if ranks.on_gpus and not together:
        spent = {way.name: Figure(*ranks.slowest(communication_ms(ranks, way, batch))) for way in trained}
        ranks.report(case.name, "GPU time of communication, with its waits", "ms", spent)


def _require_alike(ways: list[Way]) -> None:
    peer = torch.stack(ways[-1].losses)
    for way in ways[:-1]:
        difference = float(((torch.stack(way.losses) - peer).abs() / peer.abs()).max())
        if not difference < _LOSSES_DIFFER:
            raise SystemExit(f"the losses of {way.name} differ by {difference:.3f} from those of {ways[-1].name}")
