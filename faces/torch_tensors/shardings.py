"""Finds the part of a tensor that a DTensor holds on this rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import _StridedShard

from proxyccl.channels.weights.sharding import Replicate, Shard, Sharding
from proxyccl.device.errors import ArgumentError


def local_part(tensor: Any) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...]]:
    """Returns this rank's part of a DTensor, for `WeightSource.add`. Raises ArgumentError if the tensor is not a
    DTensor, the DTensor has a placement other than Shard and Replicate, or this rank is not in the DTensor's mesh.

    Returns:
        The local tensor, the index of its first element in the whole tensor, and the whole tensor's shape.
    """
    if not isinstance(tensor, DTensor):
        raise ArgumentError("array", f"expected a tensor or a DTensor of torch, not {type(tensor).__name__}")
    sharding, rank = _sharding(tensor), dist.get_rank()
    if rank not in sharding.holders:
        raise ArgumentError("array", f"rank {rank} is not in the DTensor's mesh")
    box = sharding.box(rank)
    local = tensor.to_local().detach()
    if tuple(local.shape) != box.shape:
        raise ArgumentError("array", f"the local tensor has shape {tuple(local.shape)}, expected {box.shape}")
    return local, box.start, sharding.shape


def _sharding(tensor: DTensor) -> Sharding:
    """Returns a DTensor's sharding. The mesh's axes are reordered, so that an earlier axis divides a dimension before a
    later one. FSDP with tensor parallelism divides by the later axis first; then the earlier axis' placement has a
    `split_factor`, the number of parts into which later axes have already divided the dimension.
    """
    mesh, placements = tensor.device_mesh.mesh, tensor.placements
    first: list[int] = []  # axes that divide first
    for axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            later = [
                other
                for other in range(axis + 1, len(placements))
                if isinstance(placements[other], TorchShard | _StridedShard) and placements[other].dim == placement.dim
            ]
            factor = 1
            for other in later:
                factor *= mesh.shape[other]
            if factor != placement.split_factor:
                raise ArgumentError("array", f"can't tell the order in which {placements} divide the tensor")
            first += [other for other in later if other not in first]
    order = [*first, *(axis for axis in range(len(placements)) if axis not in first)]
    mapped: list[Replicate | Shard] = []
    for axis in order:
        placement = placements[axis]
        if isinstance(placement, TorchShard | _StridedShard):
            mapped.append(Shard(placement.dim))
        elif isinstance(placement, TorchReplicate):
            mapped.append(Replicate())
        else:
            raise ArgumentError("array", f"expected the placements Shard and Replicate, not {placement!r}")
    return Sharding(tuple(tensor.shape), mesh.permute(order).tolist(), mapped)
