"""Spawns two ranks with a process group of gloo. Each rank makes calls of programs (clients) that import only deep_ep.

On the host runtime the ranks make the calls of three vLLM clients, and DeepEP's helpers create the process group. On a
GPU, which the ranks may share, the ranks make the calls of all clients.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "packages" / "deep_ep"), str(ROOT / "tests"), str(Path(__file__).parent)]
RANKS = 2


def run(rank: int, store: str) -> None:
    import deep_ep

    from support.cases.deep_ep_clients import CLIENTS, Mixture, require_close
    from support.devices import ON_HOST

    device = torch.device("cpu") if ON_HOST else torch.device("cuda", rank % torch.cuda.device_count())
    if not ON_HOST:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    if ON_HOST:
        from references import joined, require_references

        require_references(joined(rank, RANKS), rank, RANKS)
    else:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mixture = Mixture.of(rank, RANKS, device)
    assert deep_ep.Buffer(dist.group.WORLD).communicator.timeout >= 100
    for name in ("vLLM high throughput", "vLLM low latency, float8", "vLLM elastic") if ON_HOST else CLIENTS:
        require_close(CLIENTS[name](dist.group.WORLD, mixture), mixture, float8="float8" in name or "SGLang" in name)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    for name in ("WORLD_SIZE", "RANK"):
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory() as directory:
        multiprocessing.spawn(run, (f"{directory}/store",), nprocs=RANKS)
