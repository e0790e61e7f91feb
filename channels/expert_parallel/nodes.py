"""The nodes of an expert-parallel layer, as its configuration counts them and as its kernels do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxyccl.channels.expert_parallel.config import EPConfig
from proxyccl.channels.group import Group
from proxyccl.channels.joining.exchange import FLAG
from proxyccl.channels.joining.topology import Topology


@dataclass(frozen=True)
class Nodes:
    """The nodes of a layer. `counterpart` uses the configuration's nodes, all else the kernels', where each rank may be
    a node.

    Attributes:
        config: of the layer.
        topology: of its ranks.
        members: for each of the kernels' nodes its ranks.
    """

    config: EPConfig
    topology: Topology
    members: Sequence[Sequence[int]]

    @classmethod
    def of_group(cls, group: Group, config: EPConfig, *, proxied: bool) -> Nodes:
        """The nodes of a group, whose ranks all call it together.

        Every rank counts as a node of its own if ranks of a node can't access each other's memory, if nodes have
        different numbers of ranks, or with `proxied`.
        """
        topology = group.topology
        mapped = not proxied and all(topology.accessible[peer] for peer in topology.node_ranks)
        flags = group.exchange.all_gather(mapped, FLAG, "an expert-parallel layer")
        members = topology.node_members()
        if not all(flags) or len({len(ranks_of_node) for ranks_of_node in members}) > 1:
            members = [[rank] for rank in range(group.world_size)]
        return cls(config, topology, members)

    @property
    def count(self) -> int:
        """Number of the kernels' nodes."""
        return len(self.members)

    @property
    def local_size(self) -> int:
        """Ranks of each."""
        return len(self.members[0])

    @property
    def own(self) -> int:
        """This rank's node."""
        return self.of(self.config.rank)

    @property
    def local_rank(self) -> int:
        """This rank's number within its node."""
        return self.members[self.own].index(self.config.rank)

    @property
    def rails(self) -> list[int]:
        """By node, the rank with this rank's number there."""
        return [of_node[self.local_rank] for of_node in self.members]

    def copied(self, group: Group) -> bool:
        """Whether copies of GPUs, rather than a network device alone, move data between nodes. All ranks agree."""
        if self.count == 1 or group.runtime.name == "host":
            return False
        return not group.topology.has_remote_pairs() or group.topology.stages_remote_pairs()

    def counterpart(self, node: int) -> int:
        """The rank of one of the configuration's nodes that has this rank's number within its node."""
        members = self.topology.node_members()
        if len(members) == self.config.num_nodes:
            return members[node][self.topology.local_rank]
        return node * self.config.local_world_size + self.config.rank % self.config.local_world_size

    def of(self, rank: int) -> int:
        """A rank's node."""
        return next(n for n, members in enumerate(self.members) if rank in members)
