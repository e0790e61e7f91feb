"""Placement: which expert each place of the ranks holds, and the table by which a kernel sends tokens to places."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import replace

from proxyccl.channels.expert_parallel.config import MAX_EXPERTS, NUMBER_DROPS
from proxyccl.channels.expert_parallel.members import Nodes
from proxyccl.channels.expert_parallel.options import GIVEN, LayerOptions, as_placement
from proxyccl.channels.group import Group
from proxyccl.channels.memory import allocate
from proxyccl.channels.segment.calls import CollectiveCall, register_names
from proxyccl.device.errors import ArgumentError
from proxyccl.device.kernel import Launch
from proxyccl.proxy.codec import Codec

_PLACE = "place"
register_names(_PLACE)
_DIGEST = Codec(bytes, 64, "digest of a placement")
_PLACEMENT = Codec[tuple[int, list[int]]](tuple[int, list[int]], 8 * MAX_EXPERTS, name="placement")


def agree_on_placement(group: Group, options: LayerOptions) -> LayerOptions:
    """Returns the options with the newest placement of any rank, which is the one that has changed most often. The
    result's `placed` is the number of its changes. All ranks of a new layer with a placement call this together. If a
    rank was lost during `place`, only some of the remaining ranks, from which `shrink` makes a layer, may have changed
    their placement.

    Raises ArgumentError if placements that have changed equally often differ, or if a placement that a program passed
    to the constructor differs from the result.
    """
    if options.placement is None:
        return options
    everyone = group.exchange.all_gather(
        (options.placed, list(options.placement)), _PLACEMENT, "a placement of experts"
    )
    latest = max(placed for placed, _ in everyone)
    ranks = {tuple(found): rank for rank, (placed, found) in enumerate(everyone) if placed in (latest, GIVEN)}
    if len(ranks) > 1:
        raise ArgumentError("placement", f"differs between ranks {' and '.join(map(str, sorted(ranks.values())))}")
    return replace(options, placement=next(iter(ranks)), placed=max(latest, 0))


class ExpertPlaces:
    """Sends each expert's tokens to the places that hold the expert: a kernel before a dispatch replaces expert ids by
    places of the remaining ranks.

    Args:
        group, options, nodes, grid: those of the layer.
        number: the layer's number; the ranks compare their layers' numbers at each change of the placement.

    Attributes:
        ids: int32: the places of the dispatch in flight; only one dispatch is in flight at a time. The slots of experts
            without a place get an id that drops the slot; an invalid id becomes -2.
        placement: for each place of the original ranks, the number of its expert, or -1; None if the layer was made
            without a placement.
        turns: how often `place` has changed the placement, in this layer and in those from which it was made.
    """

    def __init__(self, group: Group, options: LayerOptions, nodes: Nodes, grid: tuple[int, int], number: int) -> None:
        config, dropping = options.config, options.dropping_ids
        self._group, self._options, self._local, self._number = group, options, nodes.members[nodes.own], number
        self._left = [rank for rank in range(options.all_ranks) if rank not in options.lost_ranks]
        self.turns = options.placed
        self.ids = allocate(group, (config.max_tokens, config.topk), "int32", "experts")
        self._table = allocate(group, (options.all_experts + 1 + options.places,), "int32", "experts")
        kernel = group.runtime.shipped("experts/places.h", "expert_places", compiled_only=options.use_aot)
        dropped = config.num_experts if dropping & NUMBER_DROPS else -1
        self._sizes = options.all_experts, config.topk, config.rank, dropping, dropped
        self._prepare = functools.partial(kernel.prepare, *grid)
        self.placement = None if options.placement is None else tuple(options.placement)
        self._fill(self.placement or range(options.places))

    def launch(self, id_bytes: int) -> Launch:
        """Returns the launch for ids of 4 or 8 bytes. The caller fills in the address of the ids (argument 0), the
        address of the bool array of lost slots (3) and the number of slots (4).
        """
        return self._prepare(0, self._table.ptr, self.ids.ptr, 0, 0, id_bytes, *self._sizes)

    def _fill(self, placement: Sequence[int]) -> None:
        per_rank, own = self._options.config.num_experts_per_rank, self._options.config.rank
        numbers = {rank: number for number, rank in enumerate(self._left)}
        places: list[list[int]] = [[] for _ in range(self._options.all_experts)]
        for place, expert in enumerate(placement):
            number = numbers.get(place // per_rank)
            if expert >= 0 and number is not None:
                places[expert].append(number * per_rank + place % per_rank)

        def nearest(those: list[int]) -> list[int]:
            here = [place for place in those if place // per_rank == own]
            return here or [place for place in those if place // per_rank in self._local] or those

        chosen = [nearest(those) for those in places]
        firsts = [0, *itertools.accumulate(map(len, chosen))]
        flat = [*firsts, *itertools.chain.from_iterable(chosen)]
        self._table.upload([*flat, *[-1] * (self._table.size - len(flat))])

    def place(self, placement: Sequence[int]) -> None:
        """Changes the placement; see `EPAll2AllLayer.place`."""
        placement = as_placement(placement, self._options.places, self._options.all_experts)
        group, own = self._group, hashlib.sha256(str(placement).encode()).digest()
        group.launches.agree(CollectiveCall(_PLACE, of=self._number))
        group.synchronize()  # queued dispatches read the table
        for rank, theirs in enumerate(group.exchange.all_gather(own, _DIGEST, "a placement of experts")):
            if theirs != own:
                raise ArgumentError("placement", f"differs between ranks {group.rank} and {rank}; expected the same")
        self._fill(placement)
        self.placement, self.turns = placement, self.turns + 1
