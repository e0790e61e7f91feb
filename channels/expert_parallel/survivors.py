"""Expert ids in a layer whose group has lost ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from proxyccl.channels.arguments import input_view
from proxyccl.channels.expert_parallel.arrays import ExpertArrays
from proxyccl.channels.group import Group
from proxyccl.channels.memory import allocate
from proxyccl.device.arrays import ArrayView
from proxyccl.device.errors import ArgumentError
from proxyccl.device.runtime import StreamLike


def experts_left(num_tot_experts: int, world_size: int, lost_ranks: Sequence[int]) -> int:
    """Experts of the ranks that are left, of which there are world_size; num_tot_experts are those of all.

    Raises:
        ArgumentError: lost_ranks are not different numbers of world_size + len(lost_ranks) ranks, or the experts are
            not as many on each.
    """
    all_ranks = world_size + len(lost_ranks)
    for rank in lost_ranks:
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < all_ranks:
            raise ArgumentError("lost_ranks", f"{rank!r} is not a rank; expected 0 to {all_ranks - 1}")
    if len(set(lost_ranks)) < len(lost_ranks):
        raise ArgumentError("lost_ranks", f"{list(lost_ranks)} has a rank twice; expected different ranks")
    if num_tot_experts % all_ranks:
        raise ArgumentError(
            "num_tot_experts",
            f"must be a multiple of {all_ranks}, the ranks with those that are lost, not {num_tot_experts}",
        )
    return num_tot_experts // all_ranks * world_size


class SurvivingExperts:
    """Renumbers expert ids over the ranks that are left, where those of lost ranks are dropped.

    Args:
        group: the ranks that are left.
        lost: the numbers that the lost ranks had when all were there.
        experts_per_rank: experts of each rank.
        drops_minus_one: whether the id -1 drops a slot too.
        grid: blocks of the kernel and their threads.
        use_aot: use only kernels that were compiled beforehand.
    """

    def __init__(
        self,
        group: Group,
        lost: Sequence[int],
        experts_per_rank: int,
        *,
        drops_minus_one: bool,
        grid: tuple[int, int],
        use_aot: bool,
    ) -> None:
        all_ranks = group.world_size + len(lost)
        left = [rank for rank in range(all_ranks) if rank not in lost]
        numbers = np.full(all_ranks, -1, np.int32)
        numbers[left] = np.arange(len(left))
        self._group, self._arrays = group, ExpertArrays(group)
        self._numbers = allocate(group, numbers.shape, "int32").upload(numbers)
        kernel = group.runtime.shipped("expert_survivors.h", "expert_survivors", compiled_only=use_aot)
        self._sizes = (all_ranks, experts_per_rank, group.world_size * experts_per_rank, int(drops_minus_one))
        self._prepare = functools.partial(kernel.prepare, *grid)

    def renumber(self, ids: ArrayView, stream: StreamLike) -> tuple[ArrayView, ArrayView]:
        """Queues it for int32 or int64 [T, topk]. Returns the new ids, int32, and the slots that lost ranks had, bool;
        a slot without an expert has the number of all experts that are left, and a bad id -2.
        """
        like, shape = ids.owner, ids.shape
        kept = input_view(self._group, self._arrays.new(like, shape, "int32"), "exp_indices")
        lost = input_view(self._group, self._arrays.new(like, shape, "bool"), "exp_indices")
        slots = shape[0] * shape[1]
        pointers = (ids.ptr, self._numbers.ptr, kept.ptr, lost.ptr)
        launch = self._prepare(*pointers, slots, ids.dtype.itemsize, *self._sizes)
        self._group.launches.launch(launch, stream, (like, self._numbers, kept.owner, lost.owner))
        return kept, lost
