"""barrier: no rank goes on before all have come."""

from __future__ import annotations

from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.plans import Key
from proxyccl.channels.launches import Plan
from proxyccl.channels.segment.calls import CollectiveCall
from proxyccl.device.runtime import StreamLike


def barrier(collectives: Collectives, stream: StreamLike, *, intra_node_only: bool = False) -> None:
    """See `Communicator.barrier`. With `intra_node_only` the ranks of each node wait for one another only."""
    group = collectives.group
    inside = intra_node_only and group.topology.node_count > 1
    key: Key = ("barrier", inside)
    if collectives.plans.repeat(key, None, None, stream):
        return

    def plan() -> Plan:
        if (group.topology.local_world_size if inside else group.world_size) == 1:
            return lambda _: None
        team = collectives.levels()[0] if inside else collectives.team()
        return group.runtime.shipped("moves.h", "barrier").prepare(1, team.threads, team.parameter())

    collectives.plans.run(CollectiveCall("barrier", root=int(inside), count=1), (), plan, stream, key)
