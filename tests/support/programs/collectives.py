"""Makes every collective by every algorithm, between processes; each rank checks its results."""

from __future__ import annotations

import itertools
import sys
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from proxyccl import Communicator
from support.cases.reference import ALGORITHMS, MOVES, Call

with Communicator(timeout=60) as comm:
    algorithms = ALGORITHMS if comm.topology.all_accessible() else ("two_shot", "ring", "proxy")
    for turn, dtype in enumerate(("float32", "bfloat16")):
        digests = []
        for algorithm, count in itertools.product(algorithms, (0, 1, 17, 9001)):
            call = Call("all_reduce", dtype, "sum", algorithm, count, turn % 3, turn % 2 == 0, algorithm == "ring")
            digests.append(zlib.crc32(call.start(comm).finish()))
        everyone = comm.all_gather_bytes(repr(digests).encode())
        assert len(set(everyone)) == 1, "ranks got different bits"
        for collective, algorithm in itertools.product(("reduce_scatter", *MOVES), (None, "proxy")):
            Call(collective, dtype, "sum", algorithm, 1009, root=comm.world_size - 1, in_place=turn % 2 == 0).run(comm)
    Call("all_reduce", "float32", "sum", "two_shot", 300_007).run(comm)
    comm.barrier()
sys.stdout.write(f"rank {comm.rank}: correct\n")
