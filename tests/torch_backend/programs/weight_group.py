"""Broadcasts weights from a trainer (rank 0) to two servers (ranks 1 and 2), which have another default group, with
other numbers. The servers then make a group of their own numbers.

python weight_group.py STORE RANK

The program makes the calls of SGLang 0.5.23 (2026-10-30): `load_plugins` of python/sglang/srt/plugins, then
`init_custom_process_group` of python/sglang/srt/utils/common.py.
"""

from __future__ import annotations

import importlib.metadata
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

store, rank = sys.argv[1], int(sys.argv[2])
for plugin in importlib.metadata.entry_points(group="sglang.srt.plugins"):
    plugin.load()()
if rank:
    own = 2 - rank
    dist.init_process_group("proxyccl", store=dist.FileStore(f"{store}-servers", 2), rank=own, world_size=2)
    dist.all_reduce(torch.ones(1))
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group, _ = distributed_c10d._new_process_group_helper(
    3,
    rank,
    [],
    dist.Backend("proxyccl"),
    dist.PrefixStore("weights", dist.FileStore(store, 3)),
    group_name="weights",
    timeout=timedelta(seconds=100),
    backend_options=None,
)
distributed_c10d._world.pg_group_ranks[group] = {0: 0, 1: 1, 2: 2}
weights = [torch.full((5, size), float(1 + rank)) for size in (1, 100)]
for work in [dist.broadcast(each, src=0, group=group, async_op=True) for each in weights]:
    work.wait()
assert all((each == 1).all() for each in weights)
if rank:
    gathered = [torch.zeros(1), torch.zeros(1)]
    dist.all_gather(gathered, torch.full((1,), float(own)), group=dist.new_group([0, 1]))
    assert [float(each) for each in gathered] == [0, 1]
dist.destroy_process_group(group)
dist.destroy_process_group()
print("received")
