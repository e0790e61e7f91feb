"""Makes the calls of collectives, and prepares them for later calls with arrays of the same kinds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from proxyccl.channels.arguments import readable_view
from proxyccl.channels.calls._calls import Form
from proxyccl.channels.calls.launches import Launchable
from proxyccl.channels.collectives.collective import EXECUTE, Collective, Options, Planned, plain_arrays
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.request import request_for, request_of
from proxyccl.channels.collectives.table import require_op
from proxyccl.channels.collectives.team import Team
from proxyccl.channels.execution_plans.plan import ExecutionPlan
from proxyccl.channels.group import Group
from proxyccl.channels.ranks import as_rank
from proxyccl.channels.segment.calls import CollectiveCall
from proxyccl.device.arguments.flags import as_flag
from proxyccl.device.arrays.libraries import other_streams
from proxyccl.device.runtime import StreamLike
from proxyccl.device.stream_operations import CopyBytes, StreamOperations


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
        op: the operator; None if the collective does not reduce.
        root: the root's rank; None if the collective has no root.
        algorithm, cta_policy, symmetric, stream: as for `Communicator.all_reduce`.

    Returns:
        The array that holds the call's result.

    Raises the errors of `Communicator.all_reduce`.
    """
    if collective.rooted:
        root = as_rank(collectives.group.world_size, root, "root")
    described = collective
    if isinstance(algorithm, ExecutionPlan):
        if collective is not EXECUTE:
            algorithm.require_collective(collective.name, "algorithm")
        described = Planned(algorithm, collective)
    given = x if out is None and described.in_place else out
    if given is None:
        given = described.new_output(collectives, x)
    try:
        prepare = collectives.preparing[collective]
    except KeyError:
        prepare = preparing(collectives, collective)
    options = (prepare, op, root, algorithm, cta_policy, symmetric, False, None, None)
    if described is collective:
        issue(collectives, x, given, options, stream)
    else:
        arrays, registered = plain_arrays(x, given)
        issue(collectives, *arrays, (*options[:-2], *registered), stream)
    return given


def issue(
    collectives: Collectives,
    x: Any,
    out: Any,
    options: tuple[Any, ...],
    stream: StreamLike,
    names: tuple[Sequence[str], Sequence[str]] = (("x",), ("out",)),
) -> None:
    """Makes a call. `x` and `out` are arrays, or tuples of any number of arrays; `options` are those of `Calls`
    (_calls.pyi). `names` are the names of the arrays in errors.
    """
    if not collectives.on_host:
        runtime = collectives.group.runtime
        if stream is None:
            arrays = (*x, *out) if isinstance(x, tuple) and x else (x, out)
            stream = collectives.group.launches.stream_for(None, *arrays)
        elif type(stream) is int and other_streams(runtime.device, stream):
            runtime.stream_handle(stream)  # raises an error for an invalid handle, which the C code may not detect
    if not collectives.call(x, out, options, stream):
        source = _readable(collectives.group, x, names[0])
        target = source if out is x else _readable(collectives.group, out, names[1])
        if not collectives.call(source, target, options, stream):
            raise RuntimeError(f"the views {source} and {target} can't be read")


def _readable(group: Group, given: Any, names: Sequence[str]) -> Any:
    if not isinstance(given, tuple):
        return readable_view(group, given, names[0])
    return tuple(readable_view(group, each, name) for each, name in zip(given, names, strict=bool(given)))


def preparing(collectives: Collectives, collective: Collective) -> Callable[..., Form]:
    """Returns the function that prepares a collective's calls, which is the first field of `Options`."""
    found = collectives.preparing.get(collective)
    if found is None:
        made = functools.partial(_prepare, collectives, collective)
        found = collectives.preparing.setdefault(collective, made)
    return found


def _prepare(
    collectives: Collectives,
    collective: Collective,
    x: Any,
    out: Any,
    given: tuple[Any, ...],
    reached: bool,
    logged: bool,
) -> Form:
    """Checks a call, compares it with the other ranks' calls, and prepares it. The C code of `Calls` (_calls.pyi) calls
    this function.
    """
    group, options = collectives.group, Options(*given)
    if collective.reduces:
        require_op(options.op)
    if isinstance(options.algorithm, ExecutionPlan):
        collectives.refuse_plan_that_adds(options.algorithm, "algorithm")
        collective = Planned(options.algorithm, collective, options.registered_x, options.registered_out)
        request = request_for(options.algorithm)
    else:
        request = request_of(
            collective.table, options.algorithm, options.cta_policy, options.symmetric, collectives.standing.cta_policy
        )
    call = replace(collective.check(collectives, x, out, options, request), reached=reached)
    plan = collectives.execution_plan(collective.table, call.request, call.source, call.target, call.op)
    if plan is not None:
        collective, call = Planned(plan, collective), replace(call, request=request_for(plan))

    def launch() -> Launchable:
        if collective.copies_alone and group.world_size == 1:
            copied = CopyBytes(call.target.ptr, call.source.ptr, call.source.nbytes)
            return StreamOperations(group.runtime, [copied])
        return collective.launch(collectives, call)

    entry = collective.entry(group.world_size, call)
    views = (call.source,) if isinstance(out, tuple) else (call.source, call.target)
    lent = collective.lent if options.flat and group.lent_memory.is_possible else lambda _: -1
    return collectives.prepare_form(entry, views, launch, logged=logged, ranges=collective.ranges, lent=lent)


def barrier(collectives: Collectives, stream: StreamLike, *, intra_node_only: bool = False) -> None:
    """See `Communicator.barrier`."""
    group = collectives.group
    inside = as_flag(intra_node_only, "intra_node_only") and group.topology.node_count > 1
    issue(collectives, (), (), options_of_barrier(collectives, inside=inside), stream)


def options_of_barrier(collectives: Collectives, *, inside: bool) -> tuple[Callable[..., Form], bool]:
    """Returns the options of a barrier for `Calls` (_calls.pyi): a barrier of the node's ranks if `inside`, otherwise
    of all ranks.
    """
    found = collectives.preparing.get(barrier)
    if found is None:
        found = collectives.preparing.setdefault(barrier, functools.partial(_prepare_barrier, collectives))
    return found, inside


def _prepare_barrier(
    collectives: Collectives, _x: Any, _out: Any, options: tuple[Any, bool], _reached: bool, logged: bool
) -> Form:
    group, (_, inside) = collectives.group, options

    def launch() -> Launchable:
        if (group.topology.local_world_size if inside else group.world_size) == 1:
            return StreamOperations(group.runtime, [CopyBytes(0, 0, 0)])
        shipped = group.runtime.shipped("moves.h", "barrier")
        if inside:
            teams: Sequence[Team] = collectives.levels()[:1]
        elif group.topology.has_levels():
            # After its node's barrier, every rank knows that all ranks of its node have arrived. So a rank needs to
            # exchange signals with only one rank of each other node.
            teams = collectives.levels()
        else:
            teams = (collectives.team(),)
        launches = [shipped.prepare(1, team.threads, team.parameter()) for team in teams]
        return launches[0] if len(launches) == 1 else StreamOperations(group.runtime, launches)

    return collectives.prepare_form(CollectiveCall("barrier", root=int(inside), count=1), (), launch, logged=logged)
