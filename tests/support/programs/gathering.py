"""Runs one rank of two, which gathers checked arrays over several of libfabric's interfaces until rank 0 finds a file.

    python gathering.py DIRECTORY RANK STOP

Prints "ready" after the first gather, and at the end the time of the slowest gather or the error. DIRECTORY is the
bootstrap's; STOP is the path of the file.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from proxyccl import Communicator, FileBootstrap, ProxyCCLError
from support.checked_gather import CheckedGather


def main() -> None:
    directory, rank, stop = sys.argv[1:]
    with Communicator(FileBootstrap(Path(directory), int(rank), 2)) as comm:
        gather, slowest, calls, ends = CheckedGather(comm), 0.0, 0, False
        try:
            while not ends:
                began = time.monotonic()
                gather()
                slowest, calls = max(slowest, time.monotonic() - began), calls + 1
                if calls == 1:
                    print("ready", flush=True)
                ends = comm.all_gather_bytes(bytes([comm.rank == 0 and Path(stop).exists()]))[0] == b"\1"
            print(f"slowest of {calls} gathers: {slowest:.3f} s", flush=True)
        except ProxyCCLError as error:
            print(f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {error}", flush=True)


if __name__ == "__main__":
    main()
