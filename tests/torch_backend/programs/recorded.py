"""Makes calls, the last of which may fail because of the last rank: ``recorded.py HOW``.

HOW "matching": all ranks make all calls, and write flight records. "stalled": the last rank waits until the other ranks
have timed out. "killed": the last rank is killed. "mismatch": the last rank makes a different call. Unless HOW is
"matching", the other ranks get an error.
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

import proxyccl.torch

how = sys.argv[1]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
directory = Path(os.environ["RENDEZVOUS"])
prefix = os.environ["TORCH_FR_DUMP_TEMP_FILE"]
last, reason = size - 1, ""
proxyccl.torch.register()
store = dist.FileStore(str(directory / "store"), size)
dist.init_process_group("proxyccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
pair = dist.new_group([0, 1])
x = torch.ones(4)
dist.all_reduce(x)
if rank == 0:  # a send, so that rank 0 numbers its later calls differently from the other ranks
    dist.send(x, 1)
if rank == 1:
    dist.recv(x, 0)
if rank in (0, 1):
    dist.all_gather_into_tensor(torch.empty(8), x, group=pair)
dist.barrier()
store.set(f"after {rank}", b"")
store.wait([f"after {other}" for other in range(size)])  # no rank may fail during another rank's barrier
if how == "matching":
    dist.all_to_all_single(x.new_empty(size), x[:size])
    assert proxyccl.torch.write_flight_record(prefix) == Path(f"{prefix}{rank}")
    dist.destroy_process_group()
    sys.exit()
if how == "stalled":
    dist.distributed_c10d._get_default_group().set_timeout(timedelta(seconds=1))
if rank == last:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "mismatch":
        try:
            dist.all_gather_into_tensor(x.new_empty(size * 4), x)
        except ValueError as error:
            reason = str(error)
        assert "different calls" in reason
    deadline = time.monotonic() + 60
    while not Path(f"{prefix}{rank}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
else:
    try:
        dist.all_reduce(x)
    except (dist.DistBackendError, ValueError) as error:
        reason = str(error)
    assert reason
    assert Path(f"{prefix}{rank}").exists()
dist.destroy_process_group()
