"""Kills the last rank. The other ranks shrink the default group with torch's `shrink_group` and continue."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import torch
import torch.distributed as dist

import proxyccl.torch

proxyccl.torch.register()
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.FileStore(os.environ["RENDEZVOUS"] + "/store", size)
dist.init_process_group("proxyccl", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
lost = size - 1
x = torch.ones(1000)
dist.all_reduce(x)
pair = dist.new_group([0, 1])
if rank == lost:
    os.kill(os.getpid(), signal.SIGKILL)
reason = ""
while not reason:
    try:
        dist.all_reduce(x)
    except dist.DistBackendError as error:
        reason = str(error)
assert f"rank {lost}" in reason
group = dist.distributed_c10d.shrink_group([lost])
assert dist.get_world_size() == group.size() == size - 1
assert dist.get_rank() == rank
x.fill_(1)
dist.all_reduce(x)
assert x[0] == size - 1
part = dist.new_group([0, size - 2])
if rank in (0, size - 2):
    dist.all_reduce(x, group=part)
    assert x[0] == 2 * (size - 1)
if rank == 0:
    dist.send(x, 1)
if rank == 1:
    dist.recv(x, 0)
dist.barrier()
print("went on")
dist.destroy_process_group()
