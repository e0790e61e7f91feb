"""The ranks of a layer as its user gives them. All else in this room takes their `Group`, not a `Communicator`.

`EPAll2AllLayer`, `DispatchCombine` and `DispatchCombineContext` name a communicator for their users alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from proxyccl.channels.communicator import Communicator
from proxyccl.channels.expert_parallel.calls import NEW_LAYER
from proxyccl.channels.expert_parallel.config import EPConfig
from proxyccl.channels.group import Group
from proxyccl.channels.joining.bootstrap import library_of_group
from proxyccl.channels.segment.calls import CollectiveCall
from proxyccl.channels.segment.error_record import raised
from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.codec import Codec

_ARGUMENTS = Codec[dict[str, int | float | bool | str | None]](
    dict[str, int | float | bool | str | None], 64 << 10, name="arguments"
)


@dataclass(frozen=True)
class Members:
    """The ranks of a layer.

    Attributes:
        communicator: the ranks.
        owned: whether it was made for the layer, and ends with it.
    """

    communicator: Communicator
    owned: bool = False

    @classmethod
    def of(cls, ep_group: Any, config: EPConfig) -> Members:
        """The ranks of a group. See `EPAll2AllLayer` for the types of groups.

        Raises:
            ArgumentError: rank, world_size or local_world_size are not the group's.
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
        """The same ranks, for the library's own modules."""
        return self.communicator.group

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Around what may raise: a communicator that was made for the layer is then closed."""
        try:
            yield
        except BaseException as error:
            if self.owned:
                self.group.close(reason=raised(error))
            raise

    def agree_on(self, arguments: Mapping[str, Any], name: str) -> int:
        """Refuses arguments that differ between ranks, on all of them and by name. All ranks call it together, for a
        layer that they make.

        Args:
            arguments: of the layer.
            name: of the layer in mismatches.

        Returns:
            The layer's number, by which its calls are compared.

        Raises:
            ArgumentError: an argument differs.
            MismatchError: another rank makes a call of a layer, or any other, instead.
        """
        number = self.group.launches.number_object(name)
        self.group.launches.agree(CollectiveCall(NEW_LAYER, of=number))
        everyone = self.group.exchange.all_gather(dict(arguments), _ARGUMENTS, "an expert-parallel layer")
        for rank, theirs in enumerate(everyone):
            for argument, value in everyone[0].items():
                if theirs.get(argument) != value:
                    raise ArgumentError(
                        argument,
                        f"is {value!r} on rank 0 and {theirs.get(argument)!r} on rank {rank}; give all ranks the same",
                    )
        return number

    def close(self) -> None:
        """Closes a communicator that was made for the layer."""
        if self.owned:
            self.communicator.close()


def node_size(group: Group) -> int:
    """Ranks of a node, as all ranks see it: 1 if nodes differ in size, as every rank counts as a node then."""
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
