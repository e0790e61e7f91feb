"""The process groups of a job that `programs.py` starts with torchrun's variables, and the rows that the ranks report.
The default group uses NCCL, or gloo if there is not a GPU for each rank. The groups with ProxyCCL have the same ranks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Disables NVLink multicast. NCCL reads this variable when it makes its first communicator.
os.environ["NCCL_NVLS_ENABLE"] = "0"

import torch
import torch.distributed as dist
from msgspec.structs import replace
from program import FACTS, RESULT, nvidia_driver

import proxyccl.torch  # noqa: F401  registers the backend, which torch 2.15 and later find without this import
from proxyccl import Communicator
from proxyccl.channels.collectives.selection import SizeTable
from proxyccl.tools.results import Fields

OURS = "proxyccl"
_MOVED = ("all_gather", "reduce_scatter", "all_reduce")
_LONG_BYTES = 16 << 20


@dataclass(frozen=True)
class Figure:
    """The measurements of one contender.

    Attributes:
        value: the slowest rank's value, in the row's unit.
        cpu_share: the part of the measured time in which the CPU issued the work, from 0 to 1; None if unknown.
    """

    value: float
    cpu_share: float | None = None


@dataclass(frozen=True)
class Variant:
    """Settings of our collectives, as a text of words joined by +. A number is the maximum number of blocks of a
    kernel. With `proxy` the proxies move all data, with `gather-by-proxy` only the data of long all_gathers, and with
    `scatter-by-proxy` only the data of long reduce_scatters. With `unlent`, peers do not map memory that torch
    allocates. With `registered`, the output of FSDP2's all_gather is in registered memory. `default` changes nothing.
    """

    name: str
    blocks: int | None = None
    tables: tuple[tuple[str, SizeTable], ...] = ()
    lends: bool = True
    registered: bool = False

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Parses the words. Raises ValueError for an unknown word."""
        blocks, tables, lends, registered = None, {}, True, False
        long = SizeTable(((_LONG_BYTES - 1, "kernels"),), "proxy")
        for word in text.split("+"):
            if word.isdecimal():
                blocks = int(word)
            elif word == "proxy":
                tables = dict.fromkeys(_MOVED, SizeTable((), "proxy"))
            elif word == "gather-by-proxy":
                tables["all_gather"] = long
            elif word == "scatter-by-proxy":
                tables["reduce_scatter"] = long
            elif word == "unlent":
                lends = False
            elif word == "registered":
                registered = True
            elif word != "default":
                raise ValueError(f"unknown variant {word!r}; expected a number of blocks or one of the words")
        return cls(OURS if text == "default" else f"{OURS}, {text}", blocks, tuple(tables.items()), lends, registered)


def communicator_of(group: Any, device: torch.device) -> Communicator:
    """Returns the communicator of one of our process groups."""
    backend = group if hasattr(group, "endpoints") else group._get_backend(device)
    made: Communicator = backend.endpoints.of_all(device)
    return made


class Ranks:
    """This rank and its process groups.

    Attributes:
        rank, size: this rank's number, and the number of ranks.
        on_gpus: whether each rank has a GPU.
        device: this rank's device.
        peer: the name of torch's own backend.
    """

    def __init__(self) -> None:
        local = int(os.environ["LOCAL_RANK"])
        wanted = os.environ.get("PROXYCCL_RUNTIME") != "host"
        self.on_gpus = wanted and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
        self.device = torch.device("cuda", local) if self.on_gpus else torch.device("cpu")
        if self.on_gpus:
            torch.cuda.set_device(self.device)
        self.peer = "nccl" if self.on_gpus else "gloo"
        dist.init_process_group(self.peer)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.first = self.rank == 0

    def group_of_ours(self, variant: Variant) -> Any:
        """Makes a process group of all ranks, with a new communicator. All ranks call this together."""
        group = dist.new_group(backend=OURS)
        comm = communicator_of(group, self.device)
        defaults = comm.runtime.launch_defaults
        if variant.blocks is not None:
            blocks = min(variant.blocks, defaults.blocks)
            comm.runtime.launch_defaults = replace(defaults, blocks=blocks, efficient_blocks=blocks)
        for collective, table in variant.tables:
            comm.collectives.selector = comm.collectives.selector.with_table(collective, table)
        if not variant.lends:
            comm.group.lent_memory.limit = 0
        # The first call fixes the number of blocks of the group's kernels.
        dist.reduce_scatter_tensor(self.ones(1), self.ones(self.size), group=group)
        comm.runtime.launch_defaults = defaults
        return group

    @contextmanager
    def communicator(self) -> Iterator[Communicator]:
        """Opens a communicator of all ranks, on the devices of this job."""
        runtime = "cuda" if self.on_gpus else "host"
        with Communicator.from_torch(runtime=runtime, timeout=30) as comm:
            yield comm

    def ones(self, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(count, dtype=dtype, device=self.device)

    def synchronize(self) -> None:
        if self.on_gpus:
            torch.cuda.synchronize()

    def meet(self) -> None:
        """Waits for the device and for all ranks."""
        self.synchronize()
        dist.barrier()
        self.synchronize()

    def slowest(self, *values: float) -> list[float]:
        """Returns the maximum over ranks of each value."""
        most = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        found: list[float] = most.tolist()
        return found

    def report(self, program: str, figure: str, unit: str, values: dict[str, Figure], **more: Any) -> None:
        """Prints a row for `programs.py` on the first rank. Contenders whose names begin with `OURS` are ProxyCCL's."""
        row: Fields = {"program": program, "figure": figure, "unit": unit, **more}
        row["values"] = [
            {"name": name, "ours": name.startswith(OURS), "value": found.value, "cpu_share": found.cpu_share}
            for name, found in values.items()
        ]
        if self.first:
            print(RESULT + json.dumps(row), flush=True)

    def report_facts(self) -> None:
        """Prints the ranks' devices on the first rank."""
        with self.communicator() as comm:
            facts: Fields = {"device": comm.runtime.describe(), "runtime": comm.runtime.name}
        facts |= {"nvidia_driver": nvidia_driver(), "peers": {"torch": torch.__version__}}
        if self.on_gpus:
            facts["peers"]["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        if self.first:
            print(FACTS + json.dumps(facts), flush=True)
