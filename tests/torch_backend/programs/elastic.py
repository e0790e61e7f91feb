"""Trains and loses a rank. torchrun starts the program with one restart: ``elastic.py CHECKPOINT MODE``.

MODE "kill": in the first attempt the last rank kills itself after step 3. The other ranks must get an error that names
the last rank, and the second attempt must continue from the checkpoint. MODE "leave": rank 0 exits before the other
ranks, and no rank destroys its process group.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import proxyccl.torch  # noqa: F401  the import registers the backend, as torch before 2.15 needs

STEPS = 6


def main() -> None:
    checkpoint, mode = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("proxyccl", timeout=timedelta(seconds=60))
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if mode == "leave":
        dist.all_reduce(torch.ones(1))
        if rank:
            time.sleep(0.2)
        return
    first_attempt = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    state = torch.load(checkpoint) if checkpoint.exists() else {"step": 0, "sum": torch.zeros(1)}
    if rank == 0:
        print(f"starts at step {state['step']}", flush=True)
    while state["step"] < STEPS:
        if first_attempt and state["step"] == 3 and rank == last:
            os.kill(os.getpid(), signal.SIGKILL)
        value = torch.full((1,), float(rank + 1))
        try:
            dist.all_reduce(value)
        except dist.DistBackendError as error:
            print(f"rank {rank}: {error}", flush=True)
            raise
        state["sum"] += value
        state["step"] += 1
        if rank == 0:
            torch.save(state, checkpoint)
    if rank == 0:
        print(f"ends with {state['sum'].item():g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
