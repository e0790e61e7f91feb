"""Times the sending of weights from one rank to another, with and without a cast, beside a broadcast by torch.

python benchmarks/weights.py [--json FILE] [--tensors N] [--extent N]

The model has N square matrices. In each turn the sampler's rank receives all tensors into its parameters, either by
`proxyccl.weights`, timed as the time of `WeightSource.offer`, or by a broadcast of each tensor, which the trainer casts
first. Two GPUs and NCCL are used if there are two GPUs, else the CPU and gloo. Needs torch.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from proxyccl.tools.results import write_json
from proxyccl.transfer import Agent
from proxyccl.weights import WeightSource, WeightTarget

CASES = (
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float32", "bfloat16"),
    ("float32", "float8_e4m3fn"),
    ("bfloat16", "float8_e4m3fn"),
)
"""The trainer's and the sampler's element types."""
TURNS, WARM_UP = 10, 2
BLOCK = 128  # the extent of a block of elements that share a float8 scale
GPUS = torch.cuda.device_count() >= 2


class Rank:
    """One of the two processes: rank 0 is the trainer, rank 1 the sampler."""

    def __init__(self, rank: int, folder: str, tensors: int, extent: int) -> None:
        self.rank, self.tensors, self.extent = rank, tensors, extent
        self.device = torch.device("cuda", rank) if GPUS else torch.device("cpu")
        if GPUS:
            torch.cuda.set_device(self.device)
        self.store = dist.FileStore(str(Path(folder) / "store"), 2)
        dist.init_process_group("nccl" if GPUS else "gloo", store=self.store, rank=rank, world_size=2)

    def model(self, dtype: str) -> list[torch.Tensor]:
        generator = torch.Generator(self.device).manual_seed(1)
        shape = (self.extent, self.extent)
        made = (torch.randn(shape, generator=generator, device=self.device) for _ in range(self.tensors))
        return [each.to(getattr(torch, dtype)) for each in made]

    def time(self, step: Callable[[int], object]) -> float:
        """Returns the median time of a turn in seconds. `step` gets the turn's number, from 1 on."""
        times = []
        for turn in range(1, WARM_UP + TURNS + 1):
            self.synchronize()
            start = time.perf_counter()
            step(turn)
            times.append(time.perf_counter() - start)
        return statistics.median(times[WARM_UP:])

    def synchronize(self) -> None:
        if GPUS:
            torch.cuda.synchronize()
        dist.barrier()
        if GPUS:
            torch.cuda.synchronize()

    def by_agents(self, given: str, to: str) -> float:
        """Times `WeightSource.offer`; on the sampler's rank, `WeightTarget.receive`."""
        weights, key = self.model(given if self.rank == 0 else to), f"{given} {to}"
        with Agent(f"rank {self.rank}", timeout=120) as agent:
            if self.rank == 0:
                source = WeightSource(agent, amax="float8" in to)
                for number, weight in enumerate(weights):
                    source.add(str(number), weight)
                self.store.set(key, source.card())
                return self.time(lambda turn: source.offer(turn, targets=1))
            target = WeightTarget(agent)
            blocks = (-(-self.extent // BLOCK),) * 2
            for number, weight in enumerate(weights):
                scale = torch.zeros(blocks, device=self.device) if "float8" in to else None
                weight.zero_()
                target.add(str(number), weight, scale=scale)
            target.connect([self.store.get(key)])
            return self.time(target.receive)

    def by_broadcast(self, given: str, to: str) -> float:
        """Times a broadcast of each tensor into the sampler's parameters."""
        weights, dtype = self.model(given if self.rank == 0 else to), getattr(torch, to)

        def send(turn: int) -> None:
            for weight in weights:
                dist.broadcast(weight.to(dtype), 0)
            self.synchronize()

        return self.time(send)


def run(rank: int, folder: str, tensors: int, extent: int, json: Path | None) -> None:
    own = Rank(rank, folder, tensors, extent)
    elements = tensors * extent**2
    results: list[dict[str, Any]] = []
    for given, to in CASES:
        row: dict[str, Any] = {"from": given, "to": to, "agents_ms": 1e3 * own.by_agents(given, to)}
        if to != "float8_e4m3fn":
            row["broadcast_ms"] = 1e3 * own.by_broadcast(given, to)
        results.append(row)
        if rank == 0:
            beside = f"  broadcast {row['broadcast_ms']:9.1f} ms" if "broadcast_ms" in row else ""
            rate = elements / row["agents_ms"] / 1e6
            print(f"{given:8} -> {to:13} {row['agents_ms']:9.1f} ms, {rate:6.1f} G elements/s{beside}", flush=True)
    if rank == 0 and json:
        where = {"runtime": "cuda", "device": torch.cuda.get_device_name()} if GPUS else {"runtime": "host"}
        method = f"median of {TURNS} turns, time of the trainer's rank"
        facts = {"benchmark": "weights", "method": method, "world_size": 2, **where}
        write_json(json, {**facts, "tensors": tensors, "extent": extent, "results": results})
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    parser.add_argument("--tensors", type=int, default=64 if GPUS else 4)
    parser.add_argument("--extent", type=int, default=8192 if GPUS else 2048)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (folder, parsed.tensors, parsed.extent, parsed.json), nprocs=2)


if __name__ == "__main__":
    main()
