"""Groups of ranks for the tests of experts; some groups change constants of the module `geometry`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import pytest

from proxyccl import Communicator
from proxyccl.channels.expert_parallel import geometry
from support.devices import most_ranks, runtime_with_blocks
from support.ranks import Ranks

WorldOptions = tuple[int, dict[str, int]]
"""The number of ranks, and a dict of communicator options and of `geometry` constants in lower case."""
_CONSTANTS = {"announced_slots", "few_tokens", "batch_tokens"}

T = TypeVar("T")


class World:
    """Ranks that run with changed constants of the module `geometry`. The constants are changed only during `run`,
    because other tests also run while this object exists.
    """

    def __init__(self, ranks: Ranks, local_world_size: int, constants: dict[str, int]) -> None:
        self._ranks, self._constants = ranks, constants
        self.world_size, self.local_world_size = ranks.world_size, local_world_size

    @property
    def one_node(self) -> bool:
        """Whether all ranks are on one node."""
        return self.local_world_size == self.world_size

    def run(self, body: Callable[[Communicator], T]) -> list[T]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self._constants.items():
                patch.setattr(geometry, name, value)
            return self._ranks.run(body)


def world_name(world: WorldOptions) -> str:
    size, options = world
    return "-".join([str(size), *(f"{name}{value}" for name, value in options.items())])


def params(worlds: Sequence[WorldOptions], represented: Sequence[WorldOptions]) -> list[object]:
    """Returns the worlds for which there are enough devices, as parameters of a fixture. The worlds in `represented`
    run only with --full, because other worlds cover the same code.
    """
    return [
        pytest.param(world, marks=pytest.mark.full if world in represented else [])
        for world in worlds
        if world[0] <= most_ranks()
    ]


@contextmanager
def open_world(world: WorldOptions) -> Iterator[World]:
    """Opens a world whose ranks are threads, and closes it at the end of the `with` block."""
    size, options = world
    constants = {name.upper(): value for name, value in options.items() if name in _CONSTANTS}
    others = {name: value for name, value in options.items() if name not in _CONSTANTS}
    with Ranks(size, make_runtime=runtime_with_blocks, **others) as ranks:
        yield World(ranks, others.get("local_world_size", size), constants)
