"""reduce: the reduction on one rank."""

from __future__ import annotations

from typing import Any

from proxyccl.channels.arguments import as_rank, input_view
from proxyccl.channels.collectives.all_reduce import all_reduce
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.request import Request
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.runtime import StreamLike


def reduce(collectives: Collectives, x: Any, op: str, root: int, out: Any, request: Request, stream: StreamLike) -> Any:
    """See `Communicator.reduce`. It is an all_reduce whose result the other ranks drop: no shipped kernel sends less
    for short arrays.
    """
    group = collectives.group
    root = as_rank(group.world_size, root, "root")
    if group.rank == root:
        return all_reduce(collectives, x, op, out, request, stream, root=root)
    source = input_view(group, x, "x")
    dropped = collectives.scratch(source.nbytes)
    target = ArrayView(dropped.ptr, source.shape, source.dtype, source.device, True, dropped)
    all_reduce(collectives, x, op, target, request, stream, root=root)
    return None
