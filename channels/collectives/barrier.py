"""barrier: no rank continues until all have arrived."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from proxyccl.channels.calls._calls import Form
from proxyccl.channels.calls.launches import Launchable
from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.run import issue
from proxyccl.channels.collectives.team import Team
from proxyccl.channels.segment.calls import CollectiveCall
from proxyccl.device.arguments.flags import as_flag
from proxyccl.device.runtime import StreamLike
from proxyccl.device.stream_operations import CopyBytes, StreamOperations


def barrier(collectives: Collectives, stream: StreamLike, *, intra_node_only: bool = False) -> None:
    """See `Communicator.barrier`. With `intra_node_only` only the ranks of the same node wait for one another.

    It has no arrays, so it does not use `run`.
    """
    group = collectives.group
    inside = as_flag(intra_node_only, "intra_node_only") and group.topology.node_count > 1
    issue(collectives, (), (), options_of(collectives, inside=inside), stream)


def options_of(collectives: Collectives, *, inside: bool) -> tuple[Callable[..., Form], bool]:
    """The options of barriers for `Calls` (_calls.pyi): of a node's ranks if `inside`, else of all."""
    found = collectives.preparing.get(barrier)
    if found is None:
        found = collectives.preparing.setdefault(barrier, functools.partial(_prepare, collectives))
    return found, inside


def _prepare(
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
            # The ranks across whom a rank waits next have been told that all of their nodes' ranks have arrived. So a
            # rank signals no other rank of another node.
            teams = collectives.levels()
        else:
            teams = (collectives.team(),)
        launches = [shipped.prepare(1, team.threads, team.parameter()) for team in teams]
        return launches[0] if len(launches) == 1 else StreamOperations(group.runtime, launches)

    return collectives.prepare_form(CollectiveCall("barrier", root=int(inside), count=1), (), launch, logged=logged)
