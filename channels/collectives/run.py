"""The one way to run a collective: a call that was made before is repeated; others are checked and launched."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from proxyccl.channels.collectives.call_cache import Key, call_key, copy_launchable
from proxyccl.channels.collectives.collective import Call, Collective
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.planned import EXECUTE, Planned
from proxyccl.channels.collectives.reductions import require_op
from proxyccl.channels.collectives.request import request_for
from proxyccl.channels.execution_plans.plan import ExecutionPlan
from proxyccl.channels.launches import Launchable
from proxyccl.channels.ranks import as_rank
from proxyccl.device.runtime import StreamLike


def run(
    collectives: Collectives,
    collective: Collective,
    x: Any,
    out: Any,
    op: Any = None,
    root: Any = None,
    algorithm: Any = None,
    cta_policy: Any = None,
    symmetric: Any = False,
    stream: StreamLike = None,
) -> Any:
    """Runs a collective.

    Args:
        collectives: the state of the group's collectives.
        collective: which one.
        x, out: the caller's input and output.
        op: the operator; None if the collective does not reduce.
        root: the rank; None if the collective has no root.
        algorithm, cta_policy, symmetric, stream: as for `Communicator.all_reduce`.

    Returns:
        The array that holds the result.

    Raises the errors of `Communicator.all_reduce`.
    """
    if algorithm is None and cta_policy is None and symmetric is False:
        request = collectives.unspecified
    elif isinstance(algorithm, ExecutionPlan):
        if collective is not EXECUTE:
            algorithm.require_collective(collective.name, "algorithm")
        collective, request = Planned(algorithm, collective), request_for(algorithm)
    else:
        request = collectives.request(collective.table, algorithm, cta_policy, symmetric)
    if collective.rooted:
        root = as_rank(collectives.group.world_size, root, "root")
    given = x if out is None and collective.in_place else out
    options = (collective.name, op, root, request.name)
    if stream is None and (repeat := collectives.repeat_prepared) is not None and repeat(x, given, options):
        return given
    if collective.reduces:
        require_op(op)
    key = call_key(options, x, given)
    if collectives.call_cache.repeat(key, x, given, stream):
        return given
    return _run_new(collectives, collective, collective.check(collectives, x, given, op, root, request), stream, key)


def _run_new(collectives: Collectives, collective: Collective, call: Call, stream: StreamLike, key: Key | None) -> Any:
    """Runs a call that can't be repeated, and keeps it under a key."""
    group = collectives.group
    plan = collectives.execution_plan(collective.table, call.request, call.source, call.target, call.op)
    if plan is not None:
        collective, call = Planned(plan, collective), replace(call, request=request_for(plan))

    def prepare() -> Launchable:
        if collective.copies_alone and group.world_size == 1:
            return copy_launchable(group, call.source, call.target)
        return collective.launch(collectives, call)

    collectives.call_cache.run(
        collective.entry(group.world_size, call),
        (call.source, call.target),
        prepare,
        group.launches.stream_for(stream, call.x, call.result),
        key,
    )
    return call.result
