"""What the collectives that only move bytes have in common."""

from __future__ import annotations

from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.move_plans import Part, prepare_move
from proxyccl.channels.collectives.plans import Key, copy_plan
from proxyccl.channels.collectives.request import Request
from proxyccl.channels.collectives.table import COLLECTIVES
from proxyccl.channels.launches import Plan
from proxyccl.channels.segment.calls import CollectiveCall
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.runtime import StreamLike


def run_move(
    collectives: Collectives,
    name: str,
    source: ArrayView,
    target: ArrayView,
    share: int,
    *,
    request: Request,
    stream: StreamLike,
    key: Key | None,
    part: Part,
    root: int | None = None,
    reads_output: bool = False,
) -> None:
    """Runs a collective whose kernel takes (team, source, target, share in bytes[, root]).

    The proxies do it instead, by this rank's `part`, where `Collectives.goes_by_plan`.
    With `reads_output` the rank reads what peers would overwrite, so nobody stores to its output.
    """
    group = collectives.group
    chosen = collectives.execution_plan(name, request, source, target)
    if chosen is not None:
        collectives.execution_plans.run(chosen, name, source, target, stream, key=key)
        return

    def plan() -> Plan:
        if group.world_size == 1:
            return copy_plan(group, source, target)
        algorithm = collectives.choose(name, request, source.dtype, max(source.nbytes, target.nbytes))
        if collectives.goes_by_plan(algorithm):
            return prepare_move(collectives.by_proxy(), source, target, share, part)
        team = collectives.team()
        (kernel,) = COLLECTIVES[name]
        extra = () if root is None else (root,)
        reached_at = None if reads_output else group.symmetric.reached(target)
        arguments = (team.parameter(nbytes=share, reached_at=reached_at), source.ptr, target.ptr, share, *extra)
        return group.runtime.shipped(kernel.file, kernel.name).prepare(team.grid(share), team.threads, *arguments)

    count = share // source.dtype.itemsize
    call = CollectiveCall(
        name, source.dtype.name, algorithm=request.name, root=root or 0, count=count, shape=source.shape
    )
    collectives.plans.run(call, (source, target), plan, stream, key)
