"""Runs the expert-parallel layer between processes, on a group of MPI or of torch. Each rank checks its results.

python -m mpi4py expert_parallel.py mpi|torch LOCAL_WORLD_SIZE [FILE for torch's rendezvous]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np
from mpi4py import MPI

from proxyccl import EPAll2AllLayer
from support.cases.expert_oracle import Routing

HIDDEN, TOPK, MAX_TOKENS = 24, 3, 20
kind, local_world_size = sys.argv[1], int(sys.argv[2])
rank, world_size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
group: Any = MPI.COMM_WORLD
if kind == "torch":
    import torch.distributed

    torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=world_size)
    group = torch.distributed.group.WORLD

experts = 2 * world_size
node = local_world_size, world_size
with EPAll2AllLayer(group, MAX_TOKENS, HIDDEN, TOPK, rank, experts, *node, dtype="float32") as layer:
    for step in range(3):
        rngs = [np.random.default_rng((step, source)) for source in range(world_size)]
        counts = [(7 * source + 9 * step) % (MAX_TOKENS + 1) for source in range(world_size)]
        ids = [rng.integers(0, experts + 1, (count, TOPK), np.int32) for rng, count in zip(rngs, counts, strict=True)]
        inputs = [rng.normal(size=(n, HIDDEN)).astype(np.float32) for rng, n in zip(rngs, counts, strict=True)]
        routing = Routing(tuple(ids), experts, local_world_size, MAX_TOKENS)
        rows = routing.dispatch(inputs)
        output, _, desc = layer.dispatch(inputs[rank], ids[rank])
        assert np.array_equal(output, rows[rank])
        assert np.array_equal(np.asarray(desc.token_dst_scatter_idx), routing.layout(rank).token_dst_scatter_idx)
        assert np.array_equal(layer.combine(output, desc), routing.combine(rows)[rank])
if kind == "torch":
    MPI.COMM_WORLD.Barrier()  # gloo aborts a process if a peer exits while they disconnect
    torch.distributed.destroy_process_group()
    MPI.COMM_WORLD.Barrier()
sys.stdout.write(f"rank {rank}: correct\n")
