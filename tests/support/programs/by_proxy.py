"""Makes collectives by proxy between processes. Each rank checks its results, and prints a line."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from proxyccl import Communicator
from support.cases.span_calls import COLLECTIVES, SpanCalls

with Communicator() as comm:
    calls = SpanCalls(comm, 100_000 * comm.world_size)
    for seed in range(36):  # covers all collectives, shares and roots
        collective = COLLECTIVES[seed % 3]
        share = (1, 777, 4096, 99_999)[seed // 3 % 4]
        calls.run(collective, share, seed, in_place=seed % 2 == 1, root=seed % comm.world_size)
    sys.stdout.write(f"rank {comm.rank}: correct\n")
    sys.stdout.flush()
