"""Trains a model with torch. torchrun starts the program: ``training.py KIND BACKEND``. Rank 0 prints its losses as
JSON.

KIND is ddp, ddp_join, ddp_compiled, fsdp, tensor_parallel (with FSDP between the pairs of ranks) or pipeline. The
training uses GPUs if there are at least as many GPUs as ranks.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import proxyccl.torch  # noqa: F401  the import registers the backend, as torch before 2.15 needs

WIDTH = 32
STEPS = 12


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def model() -> nn.Sequential:
    """Returns the model, which is the same on all ranks."""
    torch.manual_seed(1)
    return nn.Sequential(*[Block() for _ in range(4)])


def batches(device: torch.device, data_rank: int) -> Any:
    """Yields a batch of one rank's data for each step."""
    generator = torch.Generator().manual_seed(100 + data_rank)
    for _ in range(STEPS):
        x = torch.randn(16, WIDTH, generator=generator).to(device)
        yield x, -x


def train(parallel: nn.Module, device: torch.device, data_rank: int, group: Any) -> list[float]:
    """Trains on a rank's own data. Returns each step's loss, averaged over the ranks of `group`."""
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.5)
    losses = []
    for x, target in batches(device, data_rank):
        loss = nn.functional.mse_loss(parallel(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=group)
        losses.append(mean.item() / dist.get_world_size(group))
    return losses


def ddp(device: torch.device) -> list[float]:
    """Trains data-parallel: gradients are reduced during the backward pass."""
    parallel = nn.parallel.DistributedDataParallel(model().to(device), bucket_cap_mb=0.01)
    return train(parallel, device, dist.get_rank(), dist.group.WORLD)


def ddp_compiled(device: torch.device) -> list[float]:
    """Trains data-parallel in a program that Dynamo traces. The reducer calls the process group from C++."""
    parallel = nn.parallel.DistributedDataParallel(model().to(device), static_graph=True)
    return train(torch.compile(parallel, backend="eager"), device, dist.get_rank(), dist.group.WORLD)


def ddp_join(device: torch.device) -> list[float]:
    """Trains data-parallel, with a different number of batches on each rank. Returns the losses of this rank's data."""
    parallel = nn.parallel.DistributedDataParallel(model().to(device))
    optimizer, losses = torch.optim.SGD(parallel.parameters(), lr=0.5), []
    with parallel.join(divide_by_initial_world_size=False):
        for x, target in [*batches(device, dist.get_rank())][dist.get_rank() :]:
            loss = nn.functional.mse_loss(parallel(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def fsdp(device: torch.device) -> list[float]:
    """Trains with fully sharded parameters, which are gathered before they are used."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    whole = model().to(device)
    for block in whole:
        fully_shard(block, mesh=mesh)
    fully_shard(whole, mesh=mesh)
    return train(whole, device, dist.get_rank(), dist.group.WORLD)


def tensor_parallel(device: torch.device) -> list[float]:
    """Trains with each layer split over a pair of ranks, and parameters fully sharded between the pairs."""
    mesh = init_device_mesh(device.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor"))
    whole = model().to(device)
    for block in whole:
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["data"])
    fully_shard(whole, mesh=mesh["data"])
    return train(whole, device, mesh["data"].get_local_rank(), mesh["data"].get_group())


def pipeline(device: torch.device) -> list[float]:
    """Trains with one pipeline stage per rank; microbatches travel by send and recv."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = model()
    each = len(whole) // ranks
    stage_model = whole[rank * each : (rank + 1) * each].to(device)
    schedule = ScheduleGPipe(PipelineStage(stage_model, rank, ranks, device), 4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(stage_model.parameters(), lr=0.5)
    losses = []
    for x, target in batches(device, 0):
        of_microbatches: list[torch.Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == ranks - 1:
            schedule.step(target=target, losses=of_microbatches)
        else:
            schedule.step()
        optimizer.step()
        mean = torch.stack(of_microbatches).mean().detach() if of_microbatches else torch.zeros((), device=device)
        dist.broadcast(mean, ranks - 1)
        losses.append(mean.item())
    return losses


def main() -> None:
    kind, backend = sys.argv[1:]
    torch.set_num_threads(1)
    local = int(os.environ["LOCAL_RANK"])
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    kinds = (ddp, ddp_join, ddp_compiled, fsdp, tensor_parallel, pipeline)
    losses = next(train_so for train_so in kinds if train_so.__name__ == kind)(device)
    if dist.get_rank() == 0:
        print(json.dumps(losses), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
