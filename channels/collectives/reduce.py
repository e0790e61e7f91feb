"""reduce: the reduction on one rank."""

from __future__ import annotations

from typing import Any

from proxyccl.channels.arguments import input_view
from proxyccl.channels.collectives.all_reduce import AllReduce
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.run import run
from proxyccl.channels.ranks import as_rank
from proxyccl.device.arrays import libraries
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.runtime import StreamLike


class _Reduce(AllReduce):
    name = "reduce"
    table = "all_reduce"
    rooted = True


_REDUCE = _Reduce()


class _Dropped(ArrayView):
    """An array in scratch memory; if that moves, all calls are forgotten."""


libraries.register(_Dropped, lambda view: (view.ptr, view.shape, view.dtype.name))


def reduce(
    collectives: Collectives, x: Any, op: str, root: int, out: Any, algorithm: str | None, stream: StreamLike
) -> Any:
    """See `Communicator.reduce`. It is an all_reduce whose result the other ranks drop, because no shipped kernel sends
    less for short arrays.
    """
    group = collectives.group
    root = as_rank(group.world_size, root, "root")
    if group.rank == root:
        return run(collectives, _REDUCE, x, out, op, root, algorithm, stream=stream)
    target = dropped_result(collectives, input_view(group, x, "x"))
    run(collectives, _REDUCE, x, target, op, root, algorithm, stream=stream)
    return None


def dropped_result(collectives: Collectives, source: ArrayView) -> ArrayView:
    """The result of a reduction of an array on the ranks that drop it, in scratch memory."""
    scratch = collectives.scratch(source.nbytes)
    return _Dropped(scratch.ptr, source.shape, source.dtype, source.device, True, scratch)
