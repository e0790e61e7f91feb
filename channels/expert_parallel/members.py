"""Makes a communicator from the group that a layer's user passes, and finds the nodes of the ranks. All other modules
of this directory take a `Group`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxyccl.channels.communicator import Communicator
from proxyccl.channels.expert_parallel.config import EPConfig
from proxyccl.channels.group import Group
from proxyccl.channels.joining.bootstrap import library_of_group
from proxyccl.channels.joining.exchange import FLAG
from proxyccl.channels.joining.topology import Topology
from proxyccl.channels.segment.calls import CollectiveCall, register_names
from proxyccl.channels.segment.error_record import raised
from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.codec import Codec

# The names under which the call log compares three calls: making a layer, exchanging the numbers of tokens before a
# layer is made, and finalizing a layer. Ranks may finalize several layers in different orders.
NEW_LAYER, LAYER_SIZE, FINALIZE = "new_layer", "layer_size", "finalize"
register_names(NEW_LAYER, LAYER_SIZE, FINALIZE)

_ARGUMENTS = Codec[dict[str, int | float | bool | str | None]](
    dict[str, int | float | bool | str | None], 64 << 10, name="arguments"
)


@dataclass(frozen=True)
class Members:
    """The ranks of a layer. An `owned` communicator was made for the layer and is closed with the layer."""

    communicator: Communicator
    owned: bool = False

    @classmethod
    def of(cls, ep_group: Any, config: EPConfig) -> Members:
        """Returns the ranks of a group; see `EPAll2AllLayer` for the types of groups. Raises ArgumentError if rank,
        world_size or local_world_size of `config` are not those of the group.
        """
        owned = not isinstance(ep_group, Communicator)
        members = cls(_open(ep_group, config.local_world_size) if owned else ep_group, owned)
        with members.closed_on_error():
            for argument, mine, actual in (
                ("rank", config.rank, members.group.rank),
                ("world_size", config.world_size, members.group.world_size),
                ("local_world_size", config.local_world_size, node_size(members.group)),
            ):
                if mine != actual:
                    raise ArgumentError(argument, f"is {mine}; expected the group's, {actual}")
            members.group.failure.require_usable()
        return members

    @property
    def group(self) -> Group:
        return self.communicator.group

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Returns a context that closes an owned communicator if the body raises an exception."""
        try:
            yield
        except BaseException as error:
            if self.owned:
                self.group.close(reason=raised(error))
            raise

    def agree_on(self, arguments: Mapping[str, Any], name: str) -> int:
        """Checks that a new layer's arguments are the same on all ranks. All ranks call this together, and raise the
        same ArgumentError, which names the argument that differs. `name` is the layer's name in mismatch errors.
        Returns the layer's number, which ranks compare in the layer's calls.
        """
        number = self.group.launches.number_object(name)
        self.group.launches.agree(CollectiveCall(NEW_LAYER, of=number))
        everyone = self.group.exchange.all_gather(dict(arguments), _ARGUMENTS, "an expert-parallel layer")
        for rank, theirs in enumerate(everyone):
            for argument, value in everyone[0].items():
                if theirs.get(argument) != value:
                    raise ArgumentError(
                        argument,
                        f"is {value!r} on rank 0 and {theirs.get(argument)!r} on rank {rank}; expected equal values",
                    )
        return number

    def close(self) -> None:
        if self.owned:
            self.communicator.close()


def node_size(group: Group) -> int:
    """Returns the number of ranks per node. If nodes differ in size, returns 1, because every rank is then treated as a
    separate node.
    """
    sizes = {len(members) for members in group.topology.node_members()}
    return sizes.pop() if len(sizes) == 1 else 1


def _open(ep_group: Any, local_world_size: int) -> Communicator:
    library = library_of_group(ep_group)
    if library == "torch":
        return Communicator.from_torch(ep_group, local_world_size=local_world_size)
    if ep_group is None or library == "mpi4py":
        return Communicator.from_mpi(ep_group, local_world_size=local_world_size)
    raise ArgumentError(
        "ep_group",
        f"must be a Communicator, an MPI communicator or a torch process group, not {type(ep_group).__name__}",
    )


@dataclass(frozen=True)
class Nodes:
    """The nodes of a layer. The kernels may treat each rank as a separate node: all methods except `counterpart` use
    the kernels' nodes, whose ranks `members` lists; `counterpart` uses the nodes of `config`.
    """

    config: EPConfig
    topology: Topology
    members: Sequence[Sequence[int]]

    @classmethod
    def of_group(cls, group: Group, config: EPConfig, *, proxied: bool) -> Nodes:
        """Returns the nodes of a group. All ranks of the group call this together.

        Every rank is treated as a separate node if ranks of a node can't access each other's memory, if nodes differ in
        size, or if `proxied` is true.
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
        return len(self.members)

    @property
    def local_size(self) -> int:
        return len(self.members[0])

    @property
    def own(self) -> int:
        return self.of(self.config.rank)

    @property
    def local_rank(self) -> int:
        return self.members[self.own].index(self.config.rank)

    @property
    def rails(self) -> list[int]:
        """The rank of each node that has the same local rank as this rank."""
        return [of_node[self.local_rank] for of_node in self.members]

    def copied(self, group: Group) -> bool:
        """Returns whether GPU copies, and not only a network device, move data between nodes; the same on all ranks."""
        if self.count == 1 or group.runtime.name == "host":
            return False
        return not group.topology.has_remote_pairs() or group.topology.stages_remote_pairs()

    def counterpart(self, node: int) -> int:
        """Returns the rank, on a node of the configuration, that has the same local rank as this rank."""
        members = self.topology.node_members()
        if len(members) == self.config.num_nodes:
            return members[node][self.topology.local_rank]
        return node * self.config.local_world_size + self.config.rank % self.config.local_world_size

    def of(self, rank: int) -> int:
        return next(n for n, members in enumerate(self.members) if rank in members)
