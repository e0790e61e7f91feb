"""Checks a program at torch's debug level DETAIL: its results are unchanged, CommDebugMode counts its calls, and calls
that differ between ranks raise an error.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.tensor.debug import CommDebugMode

import proxyccl.torch
from proxyccl.torch.issuing import IS_BACKEND

proxyccl.torch.register()
dist.set_debug_level_from_env()
assert dist.get_debug_level() == dist.DebugLevel.DETAIL
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.FileStore(os.environ["RENDEZVOUS"] + "/store", size)
dist.init_process_group("proxyccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
x = torch.ones(4)
with CommDebugMode() as counted:
    dist.all_reduce(x)
    assert (x == size).all()
    assert (all_reduce(x, "sum", dist.group.WORLD) == size**2).all()
counts = {str(operation): count for operation, count in counted.get_comm_counts().items()}
expected = {"c10d_functional.all_reduce": 1}
assert counts == (expected | {"c10d.allreduce_": 1} if IS_BACKEND else expected), counts
if rank == 0:
    dist.send(x, 1)
if rank == 1:
    dist.recv(x, 0)
part = dist.new_group([0, 1])
if rank in (0, 1):
    dist.barrier(part)
dist.all_gather_object([None] * size, {"rank": rank})
store.set(f"after {rank}", b"")
# All ranks wait for each other, because a failure could end another rank's all_gather_object.
store.wait([f"after {other}" for other in range(size)])
reason = ""
try:
    dist.all_reduce(torch.ones(4 + rank))
except (RuntimeError, ValueError) as error:
    reason = str(error)
assert ("Detected mismatch" if IS_BACKEND else "count") in reason, reason
print("went on")
dist.destroy_process_group()
