"""Spawns two ranks with a process group of gloo; each runs clients with `import deep_ep` alone.

On the host runtime they are three of vLLM's; on a GPU, which the ranks may share, all of them.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "packages" / "deep_ep"), str(ROOT / "tests")]
RANKS = 2


def run(rank: int, store: str) -> None:
    """One rank."""
    import deep_ep

    from support.cases.deep_ep_clients import CLIENTS, Mixture, require_close
    from support.devices import ON_HOST

    device = torch.device("cpu") if ON_HOST else torch.device("cuda", rank % torch.cuda.device_count())
    if not ON_HOST:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mixture = Mixture.of(rank, RANKS, device)
    assert deep_ep.Buffer(dist.group.WORLD).communicator.timeout >= 100  # ranks compile between their calls
    for name in ("vLLM high throughput", "vLLM low latency, float8", "vLLM elastic") if ON_HOST else CLIENTS:
        require_close(CLIENTS[name](dist.group.WORLD, mixture), mixture, float8="float8" in name or "SGLang" in name)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        multiprocessing.spawn(run, (f"{directory}/store",), nprocs=RANKS)
