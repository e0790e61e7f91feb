"""CPU time to issue torch's calls, ours and NCCL's in turn: torchrun --nproc-per-node 2 torch_issue.py

Beside them is a group that does nothing, written in Python as ours is: the part of a call that is torch's own. Calls
are issued in bursts that fit a stream's queue, with the stream empty before each. A time is that of the slowest rank,
the median over bursts. Contenders alternate in one job. `issue_calls` and `NothingGroup` serve other programs too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

# NVLink multicast must not be used. NCCL reads this when it makes its first communicator.
os.environ["NCCL_NVLS_ENABLE"] = "0"

import torch
import torch.distributed as dist

from proxyccl.tools import options
from proxyccl.tools.results import Fields, machine, write_json
from proxyccl.tools.tables import Column, Table
from proxyccl.torch.process_group import IS_BACKEND
from proxyccl.torch.whole_group import WholeGroup

_COUNT = 256  # elements: few, so that the kernels are short
_BURST, _BURSTS = 50, 20
_COLUMNS = (
    Column("call", "", 44, left=True),
    Column("proxyccl", "(µs)", 9, ".1f"),
    Column("NCCL", "(µs)", 9, ".1f"),
    Column("nothing", "(µs)", 9, ".1f"),
    Column("ours /", "NCCL", 7, ".2f"),
)


class NothingGroup(WholeGroup, dist.ProcessGroup):  # type: ignore[misc]  # torch's class has no types
    """A process group of Python's whose calls do nothing: for torch before 2.15, as ours is there."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._size = store, rank, size
        self._work = _DoneWork()

    def rank(self) -> int:
        """This rank's number in the group."""
        return self._rank

    def size(self) -> int:
        """Number of ranks."""
        return self._size

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        """The backend's name."""
        return "nothing"

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _call(self, *arguments: Any) -> Any:
        return self._work if arguments[-1].asyncOp else None

    allreduce = allreduce_coalesced = _call
    all_gather_single = _allgather_base = reduce_scatter_single = _reduce_scatter_base = _call


class _DoneWork(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        """Nothing to wait for."""
        return True


def issue_calls(group: Any, device: torch.device) -> dict[str, Callable[[], object]]:
    """The calls to issue on a group, by name."""
    ranks = dist.get_world_size(group)
    x, share = torch.ones(_COUNT, device=device), torch.ones(_COUNT, device=device)
    whole, largest = torch.ones(_COUNT * ranks, device=device), dist.ReduceOp.MAX

    def coalesced() -> None:
        with dist._coalescing_manager(group, async_ops=True) as joint:
            dist.all_reduce(x, largest, group)
            dist.all_reduce(share, largest, group)
        joint.wait()

    def alternating() -> None:
        dist.all_reduce(x, largest, group)
        dist.all_reduce(x, largest, group, async_op=True).wait()

    return {
        "all_reduce": lambda: dist.all_reduce(x, largest, group),
        "all_reduce, async_op and wait": lambda: dist.all_reduce(x, largest, group, async_op=True).wait(),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, share, group),
        "all_gather_into_tensor, async_op and wait": lambda: dist.all_gather_into_tensor(
            whole, share, group, async_op=True
        ).wait(),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(share, whole, largest, group),
        "two coalesced all_reduces and wait": coalesced,
        "one all_reduce of each kind, in turn": alternating,
    }


def measure(groups: dict[str, Any], device: torch.device, bursts: int = _BURSTS) -> list[Fields]:
    """A row for each call: its name, and by contender the µs to issue it, on the slowest rank. All ranks call this.

    Args:
        groups: the contenders, by name; their ranks are the default group's.
        device: of the tensors.
        bursts: how many are measured of each.
    """
    calls = {name: issue_calls(group, device) for name, group in groups.items()}
    rows = []
    for what in next(iter(calls.values())):
        taken: dict[str, list[float]] = {name: [] for name in groups}
        for burst in range(-3, bursts):  # the first warm up
            for name in groups:
                torch.cuda.synchronize(device)
                dist.barrier()
                torch.cuda.synchronize(device)
                call, start = calls[name][what], time.perf_counter()
                for _ in range(_BURST):
                    call()
                if burst >= 0:
                    taken[name].append((time.perf_counter() - start) * 1e6 / _BURST)
        slowest = torch.tensor([statistics.median(each) for each in taken.values()], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        rows.append({"call": what, "µs": dict(zip(groups, slowest.tolist(), strict=True))})
    return rows


def nothing_group() -> Any:
    """A `NothingGroup` of the default group's ranks, which torch knows; None where Python makes backends (2.15)."""
    if IS_BACKEND:
        return None
    dist.Backend.register_backend(
        "nothing",
        lambda made, _: NothingGroup(made.store, made.group_rank, made.group_size),
        extended_api=True,
        devices=["cpu", "cuda"],
    )
    return dist.new_group(backend="nothing")


def main() -> None:
    """Measures, and prints a table on the first rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=options.json_file, metavar="FILE", help="write the results to FILE")
    arguments = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    groups = {"proxyccl": dist.new_group(backend="proxyccl"), "NCCL": dist.group.WORLD, "nothing": nothing_group()}
    rows = measure({name: group for name, group in groups.items() if group is not None}, device)
    if dist.get_rank() == 0:
        print(f"# torch {torch.__version__}, {dist.get_world_size()} ranks, {torch.cuda.get_device_name(device)}")
        print(f"# {machine()}")
        table = Table(_COLUMNS)
        table.header()
        for row in rows:
            times = row["µs"]
            ours, nccl = times["proxyccl"], times["NCCL"]
            table.row(row["call"], ours, nccl, times.get("nothing"), ours / nccl)
        if arguments.json:
            write_json(arguments.json, {"ranks": dist.get_world_size(), "rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
