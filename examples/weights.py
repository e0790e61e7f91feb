"""Moves weights from a trainer with FSDP to tensor-parallel samplers, by torch, on CPUs or GPUs.

python examples/weights.py
python examples/weights.py --hidden 4096 --layers 8        larger

Every process of the trainer and of the samplers is an agent. After each step, each rank of the trainer offers its
shards, and each rank of a sampler reads the slices that it needs into fused arrays. The samplers start after the
trainer's first step, and one sampler ends and is restarted. This example exchanges the weights' descriptions (cards)
through a directory; any other transport would do.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from proxyccl.transfer import Agent, DisconnectedError
from proxyccl.weights import WeightSource, WeightTarget

RANKS = 2  # the number of ranks of the trainer, and of each sampler
STEPS = 5
ENDS_AFTER = 3  # the step after which the last sampler ends, and a new one of the same name starts
GPUS = torch.cuda.device_count()


class Layer(nn.Module):
    """A layer that has the parameters of a transformer's layer, but computes less."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, 3 * hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the layer's result; x and the result have the shape (rows, hidden)."""
        y = self.norm(x)
        x = x + self.o(self.q(y) * torch.sigmoid(self.k(y)) + self.v(y))
        return x + self.down(torch.sigmoid(self.gate(x)) * self.up(x))


def device_of(rank: int) -> torch.device:
    if not GPUS:
        return torch.device("cpu")
    device = torch.device("cuda", rank % GPUS)
    torch.cuda.set_device(device)
    return device


def train(rank: int, place: Path, hidden: int, layers: int) -> None:
    device = device_of(rank)
    backend = "nccl" if GPUS >= RANKS else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(str(place / "store"), RANKS), rank=rank, world_size=RANKS)
    torch.manual_seed(7)
    model = nn.Sequential(*(Layer(hidden) for _ in range(layers))).to(device, torch.bfloat16)
    mesh = init_device_mesh(device.type, (RANKS,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Agent(f"trainer {rank}", timeout=120) as agent:
        source = WeightSource(agent)
        for name, parameter in model.named_parameters():
            source.add(name, parameter)
        publish(place / f"trainer{rank}.card", source.card())
        for step in range(1, STEPS + 1):
            x = torch.randn(4, hidden, device=device, dtype=torch.bfloat16)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            expected = {name: parameter.full_tensor().cpu() for name, parameter in model.named_parameters()}
            if rank == 0:
                torch.save(expected, place / f"step{step}.pt")  # the samplers compare received weights with this file
            if GPUS:
                torch.cuda.synchronize()
            dist.barrier()
            targets = RANKS if step > 1 else 0  # the samplers start after step 1
            try:
                source.offer(step, targets=targets)
            except DisconnectedError as error:
                print(f"trainer {rank}, step {step}: {error.peer} has ended; waiting for the next one of its name")
                source.offer(step, targets=targets)
    dist.destroy_process_group()


def sample(rank: int, place: Path, hidden: int, layers: int, last_step: int) -> None:
    """Receives weights until the last step, and compares them with the trainer's."""
    device = device_of(rank)
    columns, rows = slice(rank * hidden // RANKS, (rank + 1) * hidden // RANKS), hidden // RANKS
    parts: list[
        tuple[str, torch.Tensor, slice, tuple[slice, ...]]
    ] = []  # a tensor's name, the array, the array's rows, the tensor's slices

    def empty(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=device)

    for layer in range(layers):
        own = (slice(rank * rows, (rank + 1) * rows), slice(None))  # the rows of a column-parallel layer's weight
        qkv = empty(3 * rows, hidden)
        for index, name in enumerate("qkv"):
            parts.append((f"{layer}.{name}.weight", qkv, slice(index * rows, (index + 1) * rows), own))
        wide = (slice(rank * 3 * rows, (rank + 1) * 3 * rows), slice(None))
        gate_up = empty(2 * 3 * rows, hidden)
        for index, name in enumerate(("gate", "up")):
            parts.append((f"{layer}.{name}.weight", gate_up, slice(index * 3 * rows, (index + 1) * 3 * rows), wide))
        # A row-parallel layer holds some columns of all rows of a weight; the norm is replicated.
        parts.append((f"{layer}.o.weight", empty(hidden, rows), slice(None), (slice(None), columns)))
        deep = slice(columns.start * 3, columns.stop * 3)
        parts.append((f"{layer}.down.weight", empty(hidden, 3 * rows), slice(None), (slice(None), deep)))
        parts.append((f"{layer}.norm.weight", empty(hidden), slice(None), (slice(None),)))

    with Agent(f"sampler {rank}", timeout=120) as agent:
        target = WeightTarget(agent)
        sizes = {
            "norm": (hidden,),
            "gate": (3 * hidden, hidden),
            "up": (3 * hidden, hidden),
            "down": (hidden, 3 * hidden),
        }
        for name, array, within, slices in parts:
            start = tuple(each.start or 0 for each in slices)
            target.add(name, array, start=start, size=sizes.get(name.split(".")[1], (hidden, hidden)), within=within)
        target.connect([wait_for(place / f"trainer{trainer}.card") for trainer in range(RANKS)])
        version = 0
        while version < last_step:
            received = target.receive()
            version = received.version
            rate = received.nbytes / received.seconds / 1e9
            expected = torch.load(place / f"step{version}.pt")
            for name, array, within, slices in parts:
                assert torch.equal(array[within].cpu(), expected[name][slices]), (version, name)
            print(f"sampler {rank}, step {version}: {received.nbytes} bytes, {rate:.2f} GB/s, bit for bit", flush=True)
    # The sampler ends without `target.close()`, as if it had crashed. The trainer must notice this.


def publish(path: Path, data: bytes) -> None:
    written = path.with_suffix(".part")
    written.write_bytes(data)
    written.rename(path)


def wait_for(path: Path, seconds: float = 120) -> bytes:
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"{path} was not written in time")
        time.sleep(0.01)
    return path.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        place, size = Path(folder), (options.hidden, options.layers)

        def sampler(rank: int, last_step: int) -> multiprocessing.process.BaseProcess:
            started = context.Process(target=sample, args=(rank, place, *size, last_step))
            started.start()
            return started

        trainers = [context.Process(target=train, args=(rank, place, *size)) for rank in range(RANKS)]
        for trainer in trainers:
            trainer.start()
        wait_for(place / "step1.pt")
        samplers = [sampler(rank, STEPS if rank < RANKS - 1 else ENDS_AFTER) for rank in range(RANKS)]
        samplers[-1].join()
        assert samplers[-1].exitcode == 0
        samplers[-1] = sampler(RANKS - 1, STEPS)
        for process in (*trainers, *samplers):
            process.join()
            assert process.exitcode == 0
    print(
        f"OK: {RANKS} samplers hold the weights of {STEPS - 1} steps of an FSDP trainer, and one of them has restarted"
    )


if __name__ == "__main__":
    main()
