"""Makes rank 1 call a different collective than the other ranks, repeatedly on new communicators. All devices must stay
usable.

Processes may share a GPU. Use at least three processes, because kernels of two ranks have no loop over peers:

    mpirun -n 3 python3 -m mpi4py tests/support/programs/differing_calls.py --count 100
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np
from mpi4py import MPI

from proxyccl import Communicator, MismatchError, Runtime
from support.device_arrays import on_device
from support.devices import rank_runtime


def differ(runtime: Runtime, turn: int) -> None:
    """Opens a communicator on which rank 1's call differs. Raises MismatchError on all ranks."""
    with Communicator.from_mpi(runtime=runtime) as comm:
        x = on_device(comm, np.ones(12, np.float32))
        comm.all_reduce(x)
        if comm.rank != 1:
            comm.all_reduce(x, "sum", algorithm="two_shot")
        elif turn % 2:
            comm.broadcast(x, 0)
        else:
            comm.all_reduce(x, "max", algorithm="two_shot")
        comm.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description="Ranks make different calls, again and again.")
    parser.add_argument("--count", type=int, default=100, help="communicators that fail (%(default)s)")
    count = parser.parse_args().count
    runtime = rank_runtime(MPI.COMM_WORLD.rank)
    for turn in range(count):
        try:
            differ(runtime, turn)
        except MismatchError:
            runtime.synchronize()  # raises if the device context is lost
        else:
            raise AssertionError(f"turn {turn}: no difference was found")
    if MPI.COMM_WORLD.rank == 0:
        print(f"{count} differences were found; the devices are usable")


if __name__ == "__main__":
    main()
