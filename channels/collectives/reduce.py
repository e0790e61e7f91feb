"""reduce: the reduction on one rank."""

from __future__ import annotations

from typing import Any

from proxyccl.channels.arguments import flat_view, input_view
from proxyccl.channels.calls.launches import Launchable
from proxyccl.channels.collectives.all_reduce import AllReduce
from proxyccl.channels.collectives.collective import Call, Options
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.reductions import require_reducible
from proxyccl.channels.collectives.request import Request
from proxyccl.channels.collectives.run import run
from proxyccl.channels.ranks import as_rank
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.runtime import StreamLike

DROPPED = ()
"""In place of the output, on the ranks that drop the result."""


class _Reduce(AllReduce):
    name = "reduce"
    table = "all_reduce"
    rooted = True

    def lent(self, launchable: Launchable) -> int:
        return -1  # the ranks that drop the result have no output

    def check(self, collectives: Collectives, x: Any, out: Any, options: Options, request: Request) -> Call:
        if not isinstance(out, tuple):
            return super().check(collectives, x, out, options, request)
        read = flat_view(collectives.group, x, "x", in_bytes=False) if options.flat else None
        source = read or input_view(collectives.group, x, "x")
        require_reducible(source, options.op)
        scratch = collectives.scratch(source.nbytes)
        target = ArrayView(scratch.ptr, source.shape, source.dtype, source.device, True, scratch)
        return Call(x, out, source, target, options.op, options.root, request)


REDUCE = _Reduce()


def reduce(
    collectives: Collectives, x: Any, op: str, root: int, out: Any, algorithm: str | None, stream: StreamLike
) -> Any:
    """See `Communicator.reduce`. It is an all_reduce whose result the other ranks drop, because no shipped kernel sends
    less for short arrays.
    """
    group = collectives.group
    root = as_rank(group.world_size, root, "root")
    if group.rank == root:
        if isinstance(out, tuple):
            input_view(group, out, "out")  # refuses it, which `check` would take for DROPPED
        return run(collectives, REDUCE, x, out, op, root, algorithm, stream=stream)
    run(collectives, REDUCE, x, DROPPED, op, root, algorithm, stream=stream)
    return None
