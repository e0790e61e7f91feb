"""Runs three ranks, of which ranks 1 and 2 sleep. Rank 0 calls a collective of ranks 0 and 1, times out, and exits,
which ends the MPI job.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np

from proxyccl import Communicator
from support.device_arrays import on_device


def sleeps() -> None:
    time.sleep(60)


comm = Communicator()
part = comm.split([0, 1], timeout=2) if comm.rank < 2 else None
if comm.rank == 0:
    assert part is not None
    part.all_reduce(on_device(part, np.ones(8, np.float32)))
    part.synchronize()
else:
    sleeps()
