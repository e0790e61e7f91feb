"""Placement: which expert each place of the ranks holds, and the table by which a kernel sends tokens to places."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from proxyccl.channels.expert_parallel.config import MAX_EXPERTS, NUMBER_DROPS
from proxyccl.channels.expert_parallel.members import Nodes
from proxyccl.channels.expert_parallel.options import GIVEN, LayerOptions, as_placement
from proxyccl.channels.group import Group
from proxyccl.channels.memory import allocate
from proxyccl.channels.segment.calls import CollectiveCall, register_names
from proxyccl.channels.transfers.errors import TransferError
from proxyccl.device.errors import ArgumentError, ProxyCCLError
from proxyccl.device.kernel import Launch
from proxyccl.proxy.codec import Codec, Message, Uint64

if TYPE_CHECKING:
    from proxyccl.channels.expert_parallel.moving import Move

_PLACE = "place"
register_names(_PLACE)
_FAILURES = ProxyCCLError, OSError, MemoryError
"""The errors by which a move of weights can fail on one rank."""
_PLACEMENT = Codec[tuple[int, list[int]]](tuple[int, list[int]], 8 * MAX_EXPERTS, name="placement")


class _State(Message, frozen=True):
    """A rank's state in a call of `place`."""

    digest: bytes  # of the new placement
    arrived: bool  # whether the rank can change its placement
    failed: str  # the reason why the rank can't move weights, or ""
    rows: list[tuple[Uint64, Uint64]]  # `Move.rows`; empty without weights
    metadata: bytes  # `Move.metadata` in the first call of a move; otherwise empty


_STATE = Codec(_State, 1 << 20, "state of a placement")


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
        self._move: Move | None = None
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

    def _nearest(self, placement: Sequence[int]) -> list[list[int]]:
        """Returns, for each expert, the places on remaining ranks that are nearest to this rank. Places are numbered
        over the remaining ranks.
        """
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

        return [nearest(those) for those in places]

    def _fill(self, placement: Sequence[int]) -> None:
        chosen = self._nearest(placement)
        firsts = [0, *itertools.accumulate(map(len, chosen))]
        flat = [*firsts, *itertools.chain.from_iterable(chosen)]
        self._table.upload([*flat, *[-1] * (self._table.size - len(flat))])

    def place(self, placement: Sequence[int], weights: Any) -> bool:
        """Changes the placement; see `EPAll2AllLayer.place`."""
        placement = as_placement(placement, self._options.places, self._options.all_experts)
        group, failure = self._group, None
        group.launches.agree(CollectiveCall(_PLACE, of=self._number))
        begins = self._move is None or weights is None or self._move.placement != placement
        if begins:
            self.end_move()
            group.synchronize()  # queued work may read the table, and write weights that other ranks read
        try:
            arrived = weights is None or self._advance_move(placement, weights)
        except _FAILURES as error:
            failure, arrived = error, False
        move, failed = self._move, "" if failure is None else f"{type(failure).__name__}: {failure}"
        rows, metadata = ([], b"") if move is None else (move.rows, move.metadata if begins else b"")
        own = _State(hashlib.sha256(str(placement).encode()).digest(), arrived, failed, rows, metadata)
        everyone = group.exchange.all_gather(own, _STATE, "a placement of experts")
        if reason := failure or self._find_error(own, everyone):
            self.end_move()
            raise reason
        if move is not None and begins:
            try:
                move.start([theirs.metadata for theirs in everyone], [theirs.rows for theirs in everyone])
            except _FAILURES as error:
                move.failure = error  # all ranks raise an error in the next call
        if not all(theirs.arrived for theirs in everyone):
            return False
        try:
            self.placement, self.turns = placement, self.turns + 1
            if move is not None:
                group.synchronize()
                move.finish()
                self._move = None
            self._fill(placement)
        except BaseException as error:
            group.failure.abort(f"this rank could not change its placement of experts: {error}")
            raise
        return True

    def _advance_move(self, placement: tuple[int, ...], weights: Any) -> bool:
        """Begins a move unless one is under way. Returns whether the weights of this rank have arrived."""
        from proxyccl.channels.expert_parallel.moving import Move  # imported here, because agents take long to import

        if self._move is not None:
            return self._move.has_arrived(weights)
        per_rank = self._options.config.num_experts_per_rank
        self._move = Move(self._group, placement, weights, per_rank, self._reads(placement))
        return False

    def _reads(self, placement: Sequence[int]) -> list[tuple[int, int, int, bool]]:
        """Returns this rank's reads of a move; see `Move`. Raises ArgumentError, on all ranks, if no remaining rank has
        an expert that a remaining rank needs.
        """
        assert self.placement is not None
        per_rank, own = self._options.config.num_experts_per_rank, self._options.config.rank
        nearest, reads = self._nearest(self.placement), []
        for place, (before, expert) in enumerate(zip(self.placement, placement, strict=True)):
            rank, number = divmod(place, per_rank)
            if rank not in self._left or expert in (before, -1):
                continue
            those = nearest[expert]
            if not those:
                raise ArgumentError("placement", f"no remaining rank has the weights of expert {expert}")
            if rank == self._left[own]:
                reads.append((number, *divmod(those[(own + number) % len(those)], per_rank), before >= 0))
        return reads

    def _find_error(self, own: _State, everyone: Sequence[_State]) -> Exception | None:
        """Returns the error of a call of `place` in which a rank failed, or ranks passed different arguments."""
        mine = self._group.rank
        for rank, theirs in enumerate(everyone):
            if theirs.failed:
                return TransferError(f"rank {rank} could not move weights of experts: {theirs.failed}")
            if theirs.digest != own.digest:
                return ArgumentError("placement", f"differs between ranks {mine} and {rank}; expected the same")
            sizes, expected = ([nbytes for _, nbytes in each.rows] for each in (theirs, own))
            if sizes != expected:
                what = f"rank {rank} has rows of {sizes} bytes, and rank {mine} of {expected}"
                return ArgumentError("weights", f"{what}; expected the same arrays on all ranks")
        return None

    def hand_over(self, group: Group, placement: Sequence[int] | None) -> None:
        """Ends the move of weights, because a new layer with this placement has been made from this layer, on `group`.
        If other ranks have completed the move, this rank's weights are the new layer's after this call.
        """
        if self._move is not None and self._move.placement == placement:
            try:
                group.synchronize()
                self._move.finish()
            except BaseException as error:
                group.failure.abort(f"this rank could not complete its move of experts' weights: {error}")
                raise
        self.end_move()

    def end_move(self) -> None:
        """Ends the move of weights that is under way, if any, without changing the placement."""
        if self._move is not None:
            self._move.close()
            self._move = None
