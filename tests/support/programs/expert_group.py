"""Runs EPAll2AllLayer on groups of MPI or torch: a group of all ranks, and a group of some ranks.

    expert_group.py mpi | torch

In the MPI group of some ranks, the ranks are in reverse order.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np

from proxyccl import Communicator, EPAll2AllLayer
from support.device_arrays import on_device, on_host

TOKENS, HIDDEN, TOPK = 5, 8, 2


def mpi_groups() -> list[tuple[Any, int, int]]:
    """Returns, for each MPI group of this process, the group, the process's rank in it, and its size."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    part = world.Split(int(world.rank == 0), -world.rank)
    return [(group, group.rank, group.size) for group in (world, part)]


def torch_groups() -> list[tuple[Any, int, int]]:
    """Returns, for each torch group of this process, the group, the process's rank in it, and its size."""
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = f"file://{os.environ['RENDEZVOUS']}/torch"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    parts = [dist.new_group(ranks) for ranks in ([0], list(range(1, world_size)))]
    groups = [dist.group.WORLD, parts[rank > 0]]
    return [(group, dist.get_rank(group), dist.get_world_size(group)) for group in groups]


def check(group: Any, rank: int, size: int) -> None:
    """Checks that each token's result is the sum of its experts' results, and that the layer closes its
    communicator.
    """
    experts = 2 * size
    layer = EPAll2AllLayer(group, TOKENS, HIDDEN, TOPK, rank, experts, size, size, dtype="float32")
    comm = layer.ctx.communicator
    assert (comm.rank, comm.world_size) == (rank, size)
    rng = np.random.default_rng(rank)
    tokens, ids = rng.random((TOKENS, HIDDEN), np.float32), rng.integers(0, experts, (TOKENS, TOPK), np.int32)
    rows, _, desc = layer.dispatch(on_device(comm, tokens), on_device(comm, ids))
    counts = on_host(desc.counts).sum(axis=0)[2 * rank : 2 * rank + 2]
    factors = np.repeat([2.0 * rank + 1, 2.0 * rank + 2], counts).astype(np.float32)
    combined = on_host(layer.combine(on_device(comm, on_host(rows) * factors[:, None]), desc))
    wanted = tokens * (ids[:, :1] + 1) + tokens * (ids[:, 1:] + 1)
    np.testing.assert_allclose(combined, wanted, rtol=1e-6)
    layer.finalize()
    assert comm.closed


def main(kind: str) -> None:
    """Checks the layer on every group, and that a layer does not close a communicator of its caller."""
    groups = {"mpi": mpi_groups, "torch": torch_groups}[kind]()
    for group, rank, size in groups:
        check(group, rank, size)
    opened = {"mpi": Communicator.from_mpi, "torch": Communicator.from_torch}[kind]
    group, rank, size = groups[0]
    with opened(group, timeout=60) as comm:
        EPAll2AllLayer(comm, TOKENS, HIDDEN, TOPK, rank, size, size, size).finalize()
        assert not comm.closed
        comm.barrier()
    if kind == "torch":
        sys.modules["torch.distributed"].destroy_process_group()
    print(f"rank {rank}: correct")


main(sys.argv[1])
