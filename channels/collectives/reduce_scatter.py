"""reduce_scatter: each rank gets its share of the reduction."""

from __future__ import annotations

from typing import Any

from proxyccl.channels.arguments import (
    input_view,
    output_view,
    refuse_partial_overlap,
    share_shape,
)
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.plans import call_key, copy_plan
from proxyccl.channels.collectives.reduce_plans import prepare_reduce_scatter
from proxyccl.channels.collectives.reductions import require_op, require_reducible
from proxyccl.channels.collectives.request import Request
from proxyccl.channels.collectives.table import COLLECTIVES
from proxyccl.channels.launches import Plan
from proxyccl.channels.segment.calls import CollectiveCall
from proxyccl.device.runtime import StreamLike


def reduce_scatter(collectives: Collectives, x: Any, op: str, out: Any, request: Request, stream: StreamLike) -> Any:
    """See `Communicator.reduce_scatter`."""
    options = ("reduce_scatter", op, request.name)
    if stream is None and collectives.repeat_prepared(x, out, options):
        return out
    require_op(op)
    key = call_key(options, x, out)
    if collectives.repeat(key, x, out, stream):
        return out
    group = collectives.group
    source = input_view(group, x, "x")
    require_reducible(source, op)
    result, target = output_view(group, out, None, source, share_shape(group, source))
    refuse_partial_overlap(source, target, in_place=group.rank * target.nbytes)
    stream = group.launches.stream_for(stream, x)
    chosen = collectives.execution_plan("reduce_scatter", request, source, target, op)
    if chosen is not None:
        collectives.execution_plans.run(chosen, "reduce_scatter", source, target, stream, op=op, key=key)
        return result

    def plan() -> Plan:
        if group.world_size == 1:
            return copy_plan(group, source, target)
        algorithm = collectives.choose("reduce_scatter", request, source.dtype, source.nbytes)
        if collectives.goes_by_plan(algorithm):
            return prepare_reduce_scatter(collectives.by_proxy(), source, target, op)
        team, kernel = collectives.team(), COLLECTIVES["reduce_scatter"][0]
        arguments = (team.parameter(), source.ptr, target.ptr, target.size)
        shipped = group.runtime.shipped(kernel.file, kernel.name, source.dtype.name, op)
        return shipped.prepare(team.grid(source.nbytes), team.threads, *arguments)

    call = CollectiveCall("reduce_scatter", source.dtype.name, op, request.name, count=target.size, shape=target.shape)
    collectives.plans.run(call, (source, target), plan, stream, key)
    return result
