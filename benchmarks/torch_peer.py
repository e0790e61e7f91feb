"""Makes torch.distributed's default group a contender: NCCL on GPUs, gloo on the host runtime."""

from __future__ import annotations

import torch
import torch.distributed as dist
from mpi4py import MPI
from side_by_side import Peer

_CALLS = {
    "all_reduce": lambda out, _: dist.all_reduce(out),
    "all_gather": dist.all_gather_into_tensor,
    "all_to_all": dist.all_to_all_single,
}


def torch_peer(name: str, collective: str) -> Peer:
    """Returns a collective of torch's default group as a `Peer`. An all_reduce is in place."""
    call = _CALLS[collective]
    return Peer(name, lambda out, x: call(torch.as_tensor(out), torch.as_tensor(x)))


def join_gloo(world: MPI.Intracomm) -> None:
    """Makes a default group of gloo over the loopback, unless there is a default group."""
    if not dist.is_initialized():
        store = None
        if world.Get_rank() == 0:
            store = dist.TCPStore("127.0.0.1", 0, world.Get_size(), is_master=True, wait_for_workers=False)
        port = world.bcast(store.port if store else None)
        store = store or dist.TCPStore("127.0.0.1", port, world.Get_size(), is_master=False, wait_for_workers=False)
        dist.init_process_group("gloo", store=store, rank=world.Get_rank(), world_size=world.Get_size())
