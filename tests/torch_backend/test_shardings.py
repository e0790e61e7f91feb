"""Checks which part of a tensor a DTensor holds on each rank of a mesh. One process simulates the ranks without moving
data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from proxyccl.device.errors import ArgumentError  # noqa: E402
from proxyccl.torch_tensors.shardings import local_part  # noqa: E402
from proxyccl.transfer import Agent  # noqa: E402
from proxyccl.weights import WeightSource, WeightTarget  # noqa: E402

pytestmark = [pytest.mark.host_only("placements are the same on every device")]


@contextlib.contextmanager
def rank_of(rank: int, world_size: int) -> Iterator[None]:
    """Makes this process one rank of a fake process group during the block."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def assert_holds(parts: list[tuple[Any, tuple[int, ...], tuple[int, ...]]], whole: Any) -> None:
    """Asserts that each part equals the whole tensor's range at `start`, and that the parts cover the whole tensor."""
    covered = torch.zeros(whole.shape, dtype=torch.bool)
    for local, start, size in parts:
        assert size == tuple(whole.shape)
        at = tuple(slice(first, first + n) for first, n in zip(start, local.shape, strict=True))
        assert torch.equal(local, whole[at])
        covered[at] = True
    assert covered.all()


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((4,), [Shard(0)]),
        ((4,), [Shard(1)]),
        ((4,), [Replicate()]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Shard(0)]),
        ((2, 2), [Shard(1), Shard(0)]),
        ((2, 3), [Shard(0), Shard(1)]),
    ],
)
def test_a_rank_has_the_part_that_torch_gives_it(mesh: tuple[int, ...], placements: list[Any]) -> None:
    whole, parts = torch.arange(7 * 10.0).reshape(7, 10), []
    for rank in range(int(np.prod(mesh))):
        with rank_of(rank, int(np.prod(mesh))):
            made = init_device_mesh("cpu", mesh)
            parts.append(local_part(distribute_tensor(whole, made, placements, src_data_rank=None)))
    assert_holds(parts, whole)


@pytest.mark.parametrize("rows", [16, 10])
def test_fsdp_on_top_of_tensor_parallelism_divides_by_its_own_axis_last(rows: int) -> None:
    torch.manual_seed(3)
    whole, parts = torch.randn(rows, 4), []
    for rank in range(6):
        with rank_of(rank, 6):
            mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
            layer = torch.nn.Linear(4, rows, bias=False)
            with torch.no_grad():
                layer.weight.copy_(whole)
            parallelize_module(layer, mesh["tp"], ColwiseParallel(), src_data_rank=None)
            fully_shard(layer, mesh=mesh["dp"])
            parts.append(local_part(layer.weight))
    assert_holds(parts, whole)


def test_a_source_takes_a_module_of_fsdp() -> None:
    with rank_of(1, 2), Agent("trainer") as trainer, Agent("sampler") as sampler:
        layer = torch.nn.Linear(4, 6, dtype=torch.bfloat16)
        bias = layer.bias.detach().clone()
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        source, target = WeightSource(trainer), WeightTarget(sampler)
        for name, parameter in layer.named_parameters():
            source.add(name, parameter)
        got = torch.zeros(3, dtype=torch.bfloat16)
        target.add("bias", got, start=(3,), size=(6,))
        target.connect([source.card()])
        with source.offered(1):
            target.receive()
        assert torch.equal(got, bias[3:])


def test_other_placements_are_refused() -> None:
    with rank_of(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(ArgumentError, match="Shard and Replicate, not Partial"):
            local_part(DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False))
        with pytest.raises(ArgumentError, match="not in the DTensor's mesh"):
            local_part(DTensor.from_local(torch.ones(2), DeviceMesh("cpu", [1]), [Shard(0)], run_check=False))
    with pytest.raises(ArgumentError, match="a DTensor of torch, not Tensor"):
        local_part(torch.ones(2))
