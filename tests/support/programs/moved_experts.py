"""Kills rank 1 while other ranks read weights of experts from it. Each surviving rank prints the error, and whether all
its steps were exact: in the move, after the loss, and after another move between the survivors.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from proxyccl import Communicator, CommunicatorError, EPAll2AllLayer
from support.processes import FileBootstrap

TOKENS, HIDDEN, TOPK, PER_RANK, LARGE = 6, 16, 2, 2, 64 << 20
BEFORE, AFTER, AGAIN = (0, 1, 2, 3, 4, 1, 0, -1), (2, 3, 2, 3, 4, 1, 0, 3), (4, 1, 2, 3, 4, 0, 0, 1)

comm = Communicator(FileBootstrap.from_environment(), "host", timeout=60)
number = comm.rank
own = BEFORE[number * PER_RANK :][:PER_RANK]
weights = np.repeat(np.array(own, np.float32)[:, None] + 1, LARGE // 4, axis=1)
rng = np.random.default_rng(number)


def require_exact(layer: EPAll2AllLayer) -> None:
    """Makes a step in which expert e multiplies a token by e + 1."""
    tokens = rng.integers(0, 50, (TOKENS, HIDDEN)).astype(np.float32)
    ids = rng.integers(0, 5, (TOKENS, TOPK)).astype(np.int32)
    rows, _, desc = layer.dispatch(tokens, ids)
    counts = desc.counts.sum(axis=0)[layer.ctx.communicator.rank * PER_RANK :][:PER_RANK]
    out = layer.combine(rows * np.repeat(weights[:, -1:], counts, axis=0), desc)
    placement = np.array(layer.placement)
    left = [e for place, e in enumerate(placement) if place // PER_RANK not in layer.lost_ranks]
    np.testing.assert_array_equal(out, tokens * (np.isin(ids, left) * (ids + 1)).sum(axis=1)[:, None])
    held = placement[number * PER_RANK :][:PER_RANK, None]
    assert ((weights == held + 1) | (held < 0)).all()


layer = EPAll2AllLayer(
    comm, TOKENS, HIDDEN, TOPK, number, len(BEFORE), comm.local_world_size, 4, dtype="float32", placement=BEFORE
)
require_exact(layer)
assert not layer.place(AFTER, [weights])
if number == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while not layer.place(AFTER, [weights]):
        require_exact(layer)
except CommunicatorError as error:
    print(type(error).__name__)
    layer = layer.shrink()
assert layer.placement == BEFORE
require_exact(layer)
while not layer.place(AGAIN, [weights]):
    require_exact(layer)
require_exact(layer)
print("exact")
layer.finalize()
