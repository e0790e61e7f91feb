"""Sends tokens to experts in rounds until a rank is killed, then continues without that rank's experts. Each surviving
rank prints its number, the lost ranks, and whether each later result is the sum of the remaining experts' results.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from proxyccl import Communicator, CommunicatorError, EPAll2AllLayer
from support.device_arrays import on_device, on_host
from support.processes import FileBootstrap

TOKENS, HIDDEN, TOPK, PER_RANK = 6, 16, 3, 2
KILLED, ROUNDS = 1, 5

comm = Communicator(FileBootstrap.from_environment(), timeout=60)
number, ranks = comm.rank, comm.world_size
rng = np.random.default_rng(number)
tokens = rng.random((TOKENS, HIDDEN)).astype(np.float32)
ids = rng.integers(0, ranks * PER_RANK, (TOKENS, TOPK)).astype(np.int32)


def step(layer: EPAll2AllLayer) -> bool:
    """Runs one round, in which expert e multiplies a token by e + 1. Returns whether the sums are correct."""
    group = layer.ctx.communicator
    rows, _, desc = layer.dispatch(on_device(group, tokens), on_device(group, ids))
    own = slice(group.rank * PER_RANK, (group.rank + 1) * PER_RANK)
    factors = np.repeat(number * PER_RANK + np.arange(PER_RANK) + 1.0, on_host(desc.counts)[:, own].sum(axis=0))
    made = (on_host(rows) * factors[:, None]).astype(np.float32)
    combined = on_host(layer.combine(on_device(group, made), desc))
    left = ~np.isin(ids // PER_RANK, layer.lost_ranks)
    return np.allclose(combined, tokens * (left * (ids + 1)).sum(axis=1)[:, None], rtol=1e-6)


local = comm.local_world_size
layer = EPAll2AllLayer(comm, TOKENS, HIDDEN, TOPK, number, ranks * PER_RANK, local, ranks, dtype="float32")
assert step(layer)
try:
    comm.barrier()
    if number == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        step(layer)
except CommunicatorError:
    layer = layer.shrink()
right = [step(layer) for _ in range(ROUNDS)]
print(number, layer.lost_ranks, all(right))
layer.finalize()
assert layer.ctx.communicator.closed
