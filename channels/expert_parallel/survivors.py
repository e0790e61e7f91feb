"""Expert ids in a layer whose group has lost ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from proxyccl.channels.group import Group
from proxyccl.channels.memory import allocate
from proxyccl.channels.ranks import as_ranks
from proxyccl.device._native import lib
from proxyccl.device.arguments.integers import find_items
from proxyccl.device.errors import ArgumentError
from proxyccl.device.kernel import Launch


def lost_ranks_of(given: Any, world_size: int) -> tuple[int, ...]:
    """The argument lost_ranks in order, for a group with world_size remaining ranks.

    Raises:
        ArgumentError: it is not a sequence of different ranks from 0 to world_size + len(lost_ranks) - 1.
    """
    ranks = find_items(given)
    if ranks is None:
        raise ArgumentError("lost_ranks", f"expected ranks, not {given!r}")
    return tuple(sorted(as_ranks(world_size + len(ranks), ranks, "lost_ranks")))


def experts_left(num_tot_experts: int, world_size: int, lost: int) -> int:
    """Experts of the world_size remaining ranks, where num_tot_experts are those of all ranks, including the `lost`
    ones.

    Raises:
        ArgumentError: the experts are not as many on each rank.
    """
    all_ranks = world_size + lost
    if num_tot_experts % all_ranks:
        raise ArgumentError(
            "num_tot_experts",
            f"must be a multiple of {all_ranks}, the ranks with those that are lost, not {num_tot_experts}",
        )
    return num_tot_experts // all_ranks * world_size


class SurvivingExperts:
    """Renumbers expert ids over the remaining ranks, and drops those of lost ranks.

    Args:
        group: the remaining ranks.
        shape: of the ids: the most tokens of a dispatch, and experts that each chooses.
        lost: the original numbers of the lost ranks.
        experts_per_rank: experts of each rank.
        dropping_ids: which ids drop a slot, before and after: NUMBER_DROPS, MINUS_ONE_DROPS or both.
        grid: blocks of the kernel and their threads.
        use_aot: use only kernels that were compiled beforehand.

    Attributes:
        ids: the new ids of a dispatch, int32, of which one is under way at a time; a slot without an expert has an id
            that drops it, and a bad id -2.
        topk: experts that each token chooses.
    """

    def __init__(
        self,
        group: Group,
        shape: tuple[int, int],
        lost: Sequence[int],
        experts_per_rank: int,
        *,
        dropping_ids: int,
        grid: tuple[int, int],
        use_aot: bool,
    ) -> None:
        all_ranks = group.world_size + len(lost)
        left = [rank for rank in range(all_ranks) if rank not in lost]
        numbers = np.full(all_ranks, -1, np.int32)
        numbers[left] = np.arange(len(left))
        self._numbers = allocate(group, numbers.shape, "int32").upload(numbers)
        self.ids, self.topk = allocate(group, shape, "int32"), shape[1]
        kernel = group.runtime.shipped("experts/survivors.h", "expert_survivors", compiled_only=use_aot)
        experts = group.world_size * experts_per_rank
        dropped = experts if dropping_ids & lib.PROXYCCL_NUMBER_DROPS else -1
        self._sizes = (all_ranks, experts_per_rank, dropping_ids, dropped)
        self._prepare = functools.partial(kernel.prepare, *grid)

    def launch(self, id_bytes: int) -> Launch:
        """Its launch for ids of 4 or 8 bytes. Still to be filled in are their address (argument 0), that of the bool
        array of the slots that lost ranks had (3), and the number of slots (4).
        """
        return self._prepare(0, self._numbers.ptr, self.ids.ptr, 0, 0, id_bytes, *self._sizes)
