"""Runs a rank in a separate container: contained.py DIRECTORY RANK TASK [apart]

With `apart` the rank also gets a new network namespace, so that abstract sockets can't reach it. Tasks: `work` checks
collectives and registered memory; `agents` makes agents read each other's memory; `lose` kills rank 1 and
makes rank 0 print the resulting error.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys

import numpy as np

from proxyccl import Communicator, FileBootstrap, PeerLostError, ProxyCCLError
from proxyccl.proxy.observe.rates import Watch
from proxyccl.tools.communicators import communicators
from proxyccl.transfer import Agent, shared_empty
from support.devices import rank_runtime

_NEWNET = 0x40000000
RANKS = 2


def work(comm: Communicator) -> None:
    """Checks collectives by kernels and by proxy, symmetric memory, and a split."""
    ones = np.ones(3000, np.float32)
    array = comm.empty(3000, np.float32)
    for algorithm in ("one_shot", "proxy"):
        summed = comm.all_reduce(array.upload(ones * (comm.rank + 1)), algorithm=algorithm)
        assert np.all(summed.numpy() == 3)
    array.upload(ones * comm.rank)
    output = comm.empty(RANKS * 3000, np.float32)
    comm.all_gather(array, out=output)
    assert np.all(output.numpy().reshape(RANKS, -1) == [[0], [1]])
    with comm.split(range(RANKS)) as part:
        assert np.all(part.all_reduce(array.upload(ones)).numpy() == RANKS)
        assert part.group.ways == comm.group.ways
    watch = Watch(comm.job)
    watch.rates()
    print("paths:", *(each.paths() for each in watch.rates() if each.rank == comm.rank))
    seen = [view for view in communicators() if view.name == comm.job]
    print("seen:", *([rank.rank for rank in view.present] + view.missing for view in seen))


def agents(comm: Communicator) -> None:
    """Makes agents read each other's numpy array, shared host memory and device memory."""
    nbytes = 1 << 20
    offered = np.full(nbytes, 10 + comm.rank, np.uint8), shared_empty(nbytes, np.uint8)
    offered[1][:] = 20 + comm.rank
    of_device, read = (comm.runtime.allocate(nbytes) for _ in range(2))
    comm.runtime.fill(of_device.ptr, 30 + comm.rank, nbytes)
    got = np.zeros((3, nbytes), np.uint8)
    with Agent(f"agent {comm.rank}", listen=()) as agent:
        regions = [*map(agent.register, offered), agent.register((of_device.ptr, nbytes), kind="vram")]
        own = agent.metadata().hex(), *(region.address for region in regions)
        known = json.loads(comm.all_gather_bytes(json.dumps(own).encode())[1 - comm.rank])
        peer = agent.add(bytes.fromhex(known[0]))
        agent.register(got)
        agent.register((read.ptr, nbytes), kind="vram")
        for here, there in zip((got[0].ctypes.data, got[1].ctypes.data, read.ptr), known[1:], strict=True):
            transfer = agent.prepare("read", peer, [(here, there, nbytes)]).start()
            agent.wait([transfer])
            print("by", transfer.path)
        comm.all_gather_bytes(b"read")
    comm.runtime.copy(got[2].ctypes.data, read.ptr, nbytes)
    assert np.all(got == np.array([[11], [21], [31]]) - comm.rank)


def lose(comm: Communicator) -> None:
    """Kills rank 1. Rank 0 prints the PeerLostError that it gets."""
    try:
        comm.barrier()
        comm.synchronize()
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(comm.empty(3000, np.float32).fill(1))
        comm.synchronize()
    except PeerLostError as error:
        print("lost:", error)


if __name__ == "__main__":
    directory, rank, task, *apart = sys.argv[1:]
    if apart and ctypes.CDLL(None, use_errno=True).unshare(_NEWNET):
        sys.exit(f"no network namespace: {os.strerror(ctypes.get_errno())}")
    try:
        with Communicator(FileBootstrap(directory, int(rank), RANKS), rank_runtime(int(rank)), timeout=200) as comm:
            print("ways:", *comm.group.ways.values())
            {"work": work, "lose": lose, "agents": agents}[task](comm)
            print("done", flush=True)
    except ProxyCCLError as error:
        print(f"{type(error).__name__}: {error}")
