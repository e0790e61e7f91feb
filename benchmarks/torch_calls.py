"""The calls of torch for which `programs.py` measures the time to issue, and a process group in Python whose calls do
nothing. Calls of this group show how long torch itself takes; a training step with this group shows the time without
communication.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from proxyccl.torch.issuing import IS_BACKEND
from proxyccl.torch.process_group import WholeGroup

_COUNT = 256  # number of elements: few, so that the kernels are short


class NothingGroup(WholeGroup, dist.ProcessGroup):  # type: ignore[misc]  # torch's class has no types
    """A process group in Python whose calls do nothing. Before torch 2.15, our backend is also a Python class, so this
    group can be compared with our group.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._size = store, rank, size
        self._work, self.calls = _DoneWork(), SimpleNamespace(group_name="", group_desc="")

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return "nothing"

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _call(self, *arguments: Any) -> Any:
        return self._work if getattr(arguments[-1], "asyncOp", True) else None

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        """Does nothing. DDP calls this method and waits for the result."""
        return self._call(options) and _DoneWork(tensors)

    allreduce_coalesced = reduce = broadcast = allgather = all_to_all_single = alltoall_base = _call
    all_gather_single = _allgather_base = reduce_scatter_single = _reduce_scatter_base = _call


class _DoneWork(dist.Work):
    def __init__(self, result: Any = ()) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        return True

    def get_future(self) -> Any:
        devices = {each.device for each in self._result if each.is_cuda}
        found: Any = torch.futures.Future(devices=list(devices))
        found.set_result(self._result)
        return found


def issue_calls(group: Any, device: torch.device) -> dict[str, Callable[[], object]]:
    """Returns the calls to issue on a group, by name."""
    ranks = dist.get_world_size(group)
    x, share = torch.ones(_COUNT, device=device), torch.ones(_COUNT, device=device)
    whole, largest = torch.ones(_COUNT * ranks, device=device), dist.ReduceOp.MAX
    gathered, sizes = torch.ones(_COUNT * ranks, device=device), [_COUNT] * ranks
    parts = list(torch.ones(_COUNT * ranks, device=device).split(_COUNT))

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
        "reduce": lambda: dist.reduce(x, 0, largest, group),
        "all_gather of a list": lambda: dist.all_gather(parts, x, group),
        "all_to_all_single with sizes": lambda: dist.all_to_all_single(gathered, whole, sizes, sizes, group),
        "two coalesced all_reduces and wait": coalesced,
        "one all_reduce of each kind, in turn": alternating,
    }


@functools.cache
def nothing_group() -> Any:
    """Makes a `NothingGroup` of the default group's ranks and registers it with torch. Returns None from torch
    2.15 on.
    """
    if IS_BACKEND:
        return None
    dist.Backend.register_backend(
        "nothing",
        lambda made, _: NothingGroup(made.store, made.group_rank, made.group_size),
        extended_api=True,
        devices=["cpu", "cuda"],
    )
    return dist.new_group(backend="nothing")
