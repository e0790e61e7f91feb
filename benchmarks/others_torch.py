"""Programs that use only torch, for others_rank.py. The programs don't mention ProxyCCL.

Each program takes a `World`, iterates over its `steps`, and passes its outputs to `keep`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from others_rank import World
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from torch.distributed.tensor import Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.attention import SDPBackend, sdpa_kernel


class Block(nn.Module):
    """A layer of a transformer without its attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Applies the layer to rows of the model's width."""
        grown: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return grown


def blocks(world: World, layers: int, width: int) -> nn.Sequential:
    """Returns layers with the same weights on all ranks; on CPUs the layers are narrow."""
    torch.manual_seed(1)
    width = width if world.on_gpus else 64
    with world.device:
        return nn.Sequential(*(Block(width) for _ in range(layers))).to(world.dtype)


def rows_for(world: World, model: nn.Sequential, rows: int, seed: int = 0) -> Tensor:
    """Returns random rows as a model's input."""
    generator = torch.Generator(world.device).manual_seed(seed)
    size = (rows if world.on_gpus else 16), model[0].norm.normalized_shape[0]
    return torch.randn(size, device=world.device, generator=generator).to(world.dtype)


def train(world: World, model: nn.Module, x: Tensor) -> None:
    """Trains by SGD on one batch, and keeps the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in world.steps():
        loss = model(x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        world.keep(loss)


def tensor_parallel(world: World, *, copies: int, sharded: bool) -> None:
    """Trains several copies of a model with DTensor: norms are sequence-parallel, and linear layers are sharded. If
    `sharded` is true, FSDP2 shards each parameter further, over the copies.
    """
    mesh = init_device_mesh(world.device.type, (copies, world.size // copies), mesh_dim_names=("dp", "tp"))
    model = blocks(world, 6, 4096)
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=Shard(0)),
        "down": RowwiseParallel(output_layouts=Shard(0)),
    }
    for block in model:
        parallelize_module(block, mesh["tp"], plan)
    for part in (*model, model) if sharded else ():
        fully_shard(part, mesh=mesh["dp"])
    x = rows_for(world, model, 4096, seed=mesh["dp"].get_local_rank())
    train(world, model, x.chunk(mesh["tp"].size())[mesh["tp"].get_local_rank()])


def fsdp2(world: World, *, offload: bool) -> None:
    """Trains by FSDP2; with `offload`, parameters stay on the CPU."""
    model = blocks(world, 8, 2048)
    mesh = init_device_mesh(world.device.type, (world.size,))
    options = (
        {"mesh": mesh, "offload_policy": CPUOffloadPolicy(pin_memory=world.on_gpus)} if offload else {"mesh": mesh}
    )
    for block in model:
        fully_shard(block, **options)
    fully_shard(model, **options)
    train(world, model, rows_for(world, model, 2048, seed=world.rank))


def functional(world: World, *, compiled: bool) -> None:
    """Runs an all_gather of 64 MiB, two matrix products and a reduce_scatter, by functional collectives."""
    width = 4096 if world.on_gpus else 64
    rows = (64 << 20) // 2 // width if world.on_gpus else 64
    group = dist.group.WORLD
    generator = torch.Generator(world.device).manual_seed(1 + world.rank)
    x = torch.randn(rows // world.size, width, device=world.device, generator=generator).to(world.dtype)
    generator.manual_seed(0)
    first, second = (
        torch.randn(width, width, device=world.device, generator=generator).to(world.dtype) / width**0.5
        for _ in range(2)
    )

    def layer(x: Tensor) -> Tensor:
        whole = funcol.all_gather_tensor(x, 0, group)
        return funcol.reduce_scatter_tensor(torch.relu(whole @ first) @ second, "sum", 0, group)

    call: Callable[[Tensor], Tensor] = torch.compile(layer) if compiled else layer
    for _ in world.steps():
        world.keep(call(x))


def context_parallel_attention(world: World, *, rotation: str) -> None:
    """Computes causal attention, forward and backward, with 16 heads over a sequence that is divided among the
    ranks.
    """
    mesh = init_device_mesh(world.device.type, (world.size,))
    heads, tokens, width = (16, 16384, 128) if world.on_gpus else (4, 64, 16)
    set_rotate_method(rotation)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, width, device=world.device, dtype=world.dtype) for _ in range(3))
    for _ in world.steps():
        whole = [tensor.clone() for tensor in (q, k, v)]
        shared = context_parallel(mesh, buffers=whole, buffer_seq_dims=[2, 2, 2], no_restore_buffers=set(whole))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), shared:
            for tensor in whole:
                tensor.requires_grad_()
            y = nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
            y.float().square().mean().backward()
            world.keep(y)
            world.keep(whole[1].grad)


def new_tensors(world: World, *, call: str, nbytes: int) -> None:
    """Makes calls, each with a newly allocated tensor."""
    count, calls = nbytes // 4 // (1 if world.on_gpus else 256), 20
    for step in world.steps():
        for number in range(calls):
            x = torch.empty(count, device=world.device).fill_(world.rank + step + number)
            if call == "all_reduce":
                dist.all_reduce(x)
                y = x
            else:
                y = torch.empty(count * world.size, device=world.device)
                dist.all_gather_into_tensor(y, x)
        world.keep(y)


def decoder(world: World, *, batch: int, graph: bool) -> None:
    """Computes one token per step with a decoder, whose layers have two all_reduces each; with `graph`, the step is
    captured in a CUDA graph.
    """
    layers, width = (32, 4096) if world.on_gpus else (2, 64)
    share = width // world.size
    generator = torch.Generator(world.device).manual_seed(1 + world.rank)
    weights = [
        torch.randn(size, device=world.device, generator=generator).to(world.dtype) / width**0.5
        for _ in range(2 * layers)
        for size in ((width, share), (share, width))
    ]
    x = torch.randn(batch, width, device=world.device, generator=generator.manual_seed(0)).to(world.dtype)

    @torch.no_grad()
    def token() -> Tensor:
        y = x
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            part = torch.relu(y @ up) @ down
            dist.all_reduce(part)
            y = nn.functional.layer_norm(y + part, (width,))
        return y

    call: Callable[[], Any] = token
    y = None
    for step in world.steps(40):
        if graph and step == 1:  # the first step is a warm-up
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                y = token()
            call = captured.replay
        made = call()
        world.keep(made if made is not None else y)


def checkpoint(world: World, *, what: str) -> None:
    """Saves or loads a model of FSDP2 by torch.distributed.checkpoint."""
    model = blocks(world, 4, 2048)
    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = rows_for(world, model, 16)
    path = world.folder / f"checkpoint {dist.get_backend()}"
    dcp.save(get_model_state_dict(model), checkpoint_id=path)
    for _ in world.steps(6):
        if what == "save":
            dcp.save(get_model_state_dict(model), checkpoint_id=path)
            continue
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(model, state)
    world.keep(model(x))


def pipeline(world: World, *, schedule: str) -> None:
    """Trains with a schedule of torch.distributed.pipelining, with two stages per rank if the schedule supports
    several.
    """
    made = get_schedule_class(schedule)
    several = issubclass(made, PipelineScheduleMulti)
    in_v = made in (ScheduleZBVZeroBubble, ScheduleDualPipeV)
    stages = world.size * (2 if several else 1)
    model = blocks(world, stages, 2048)
    mine = [world.rank]
    if several:
        mine.append(stages - 1 - world.rank if in_v else world.size + world.rank)
    parts = [PipelineStage(model[stage], stage, stages, world.device) for stage in mine]
    micro = 4 * world.size
    target = torch.zeros_like(x := rows_for(world, model, 512 * micro))
    options = {"loss_fn": lambda y, _: y.float().square().mean()}
    running = made(parts if several else parts[0], micro, **options)
    last = stages - 1 in mine
    optimizer = torch.optim.SGD([p for part in parts for p in part.submod.parameters()], lr=1e-2)
    for _ in world.steps():
        losses: list[Tensor] = []
        running.step(*([x] if 0 in mine else []), **({"target": target, "losses": losses} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
        if last:
            world.keep(torch.stack(losses).mean())
