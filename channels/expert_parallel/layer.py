"""EPAll2AllLayer: the all-to-all of a mixture of experts, from tokens to experts and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from msgspec import Struct

from proxyccl.channels import array_libraries
from proxyccl.channels.calls._calls import SentCall
from proxyccl.channels.collectives.run import barrier
from proxyccl.channels.communicator import Communicator
from proxyccl.channels.expert_parallel.arguments import input_array, whole_number
from proxyccl.channels.expert_parallel.arrays import strides_of
from proxyccl.channels.expert_parallel.call_form import LayerParts
from proxyccl.channels.expert_parallel.combine_form import RowSignals
from proxyccl.channels.expert_parallel.config import SCALED_ELEMENTS
from proxyccl.channels.expert_parallel.context import DispatchCombineContext
from proxyccl.channels.expert_parallel.forms import Forms
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.members import Members, node_size
from proxyccl.channels.expert_parallel.options import LayerOptions
from proxyccl.channels.expert_parallel.placement import agree_on_placement
from proxyccl.channels.expert_parallel.recording import (
    Dispatched,
    recorder_of,
    recorder_of_combine,
    recorder_of_dispatch,
    refuse_recording,
)
from proxyccl.channels.ranks import as_ranks
from proxyccl.device.errors import ArgumentError, PeerLostError
from proxyccl.device.runtime import StreamLike

_MOST_NARROWED = 16


def _require_communicator(communicator: Any) -> None:
    if not isinstance(communicator, Communicator):
        raise ArgumentError("communicator", f"must be a Communicator, not {type(communicator).__name__}")


class UnderWay(Struct):
    """The state of a layer's dispatch or combine in two halves.

    Attributes:
        name: "dispatch" or "combine".
        call: the call whose first half is queued; None if no call is pending.
        end: a function that makes the second half. A further call of the same name first calls the function, or raises
            an error if the function is None.
    """

    name: str
    call: SentCall | None = None
    end: Callable[[], None] | None = None


class EPAll2AllLayer:
    """Sends tokens to the ranks of their experts, and sums the experts' results.

    A token's row goes once to every rank of the token's node that has one of the token's experts, and once to each
    other node with such an expert. The receiver copies the row to the output rows of the receiver's experts. All ranks
    construct the layer together and make the same calls in the same order; their numbers of tokens may differ.

    Calls are queued on the caller's stream. Without `max_recv_tokens` (the exact mode) `dispatch` waits on the CPU for
    the number of received rows, but not for the rows. With `max_recv_tokens`, `dispatch` does not wait and can be
    captured in a graph.

    If torch records gradients and an input requires one, `dispatch`, `redispatch` and `combine` are recorded, whether
    whole or in two halves. A call must be recorded on all ranks or on none, because the backward pass also calls the
    layer (in whole calls). Dispatches in float8, and calls with layout="padded", are not recorded.

    Args:
        ep_group: a `Communicator`, an MPI communicator or a torch process group. From an MPI communicator or a process
            group the layer makes a Communicator, which `finalize` closes.
        max_tokens: maximum number of tokens of one rank in one dispatch.
        hidden: number of elements of a token.
        topk: number of experts that each token chooses, 1 to 16.
        rank: this rank in the group.
        num_tot_experts: number of experts of all ranks together; rank r has the r-th equal share.
        local_world_size: number of ranks of a node; 1 if nodes differ in size.
        world_size: number of ranks of the group.
        dtype: the type of tokens: "bfloat16", "float16", "float32" or "float64", by name or as torch's or numpy's type.
        weight_dtype: the type of routing weights, one of the same four types.
        num_sm: maximum number of blocks, and so of multiprocessors, of a kernel that moves rows between ranks.
        enable_local_combine: whether `combine` first sums a token's rows on each rank, rounded to `dtype`. Sums on each
            rank send less data, but round the result twice. Sums on each rank are possible only on one node.
        use_aot: whether to use only kernels that were compiled beforehand (`proxyccl compile`).
        max_recv_tokens: the number of rows of every output; None for outputs of the exact size.
        dispatch_dtype: None to send tokens unchanged, or "float8_e4m3fn" to send them in float8: each 128 elements
            of a row share a float32 scale, and element times scale is the value. With "float4_e2m1fn_x2", callers pass
            rows that they have quantized to float4: uint8 [T, hidden / 2], with two values in a byte, and their scales.
            hidden is then a multiple of 32. `combine` still uses `dtype`.
        scale_elements: how many elements share a scale; the last scale of a row may have fewer. Unless scale_elements
            is 128 and divides `hidden`, the layer does not quantize tokens, and callers pass pairs of rows and scales.
            A scale is any 4 bytes, for example four packed exponents (UE8M0) for 512 elements.
        num_scales: with dispatch_dtype: the number of scales of a row, if callers pad the scales; None for the number
            that follows from scale_elements.
        scales_by_columns: with dispatch_dtype, layout="padded" and tensors of torch: whether scales are stored by
            columns, so that the scales of an expert's consecutive rows are adjacent. Columns begin at multiples of 16
            bytes, as bulk copies (TMA) need. The shape of the scales is the same as without this option.
        grows: in the exact mode, a rank with more than max_tokens tokens makes `dispatch` raise CapacityError on all
            ranks, with the largest number of tokens of any rank in `needed`; the layer stays usable. Without `grows`,
            only the rank with too many tokens raises an error, ArgumentError.
        layout: "expert" for a row for each slot, ordered by expert; "rank" for one row for each token that has an
            expert on this rank, ordered by source rank and token. With "rank" the program finds a row's experts in
            `desc.local_expert_ids`. "padded", for few tokens, gives each expert room for all rows that the ranks may
            send it, world_size * max_tokens; `desc.expert_rows` says how many arrived. With "padded" no call waits on
            the CPU.
        lost_ranks: the ranks that the group has lost, by their original numbers; see `shrink`. The group's rank r is
            then the r-th remaining rank, and keeps its experts. num_tot_experts includes the experts of lost ranks. A
            slot that chooses an expert of a lost rank is dropped, and `desc.lost_slots` marks the dropped slots.
        placement: None if rank r has the r-th equal share of the experts. Otherwise each rank has num_tot_experts /
            world_size places, and placement[p] is the number of the expert that place p of all ranks holds, or -1 for
            an empty place; rank r has the r-th equal share of the places. Tokens choose experts 0 to max(placement),
            each of which has at least one place. A token goes to a place of its expert on its own rank, if there is
            one, otherwise on its own node, otherwise on any remaining rank; the tokens of a rank take turns at the
            places that are equally near. In outputs and descriptors, and in this documentation except for
            `exp_indices`, places stand for experts. A slot is dropped, and marked in `desc.lost_slots`, only if all
            places of its expert are on lost ranks. See `place`.
        expert_alignment: with layout="expert", each expert's rows begin at a multiple of this number, so outputs have
            gaps. No rank writes the rows in gaps, for which `desc.row_slots` is -1. In the exact mode
            `desc.num_tokens_per_expert` then returns each expert's number of rows. None for rows without gaps.
        output_buffers: with layout="rank": the number of outputs for which the layer has memory. On one node whose
            ranks reach each other's memory, senders then store rows directly where the caller reads them. With n output
            buffers, an output of `dispatch` stays valid during the next n - 1 calls of `dispatch`, but not after
            `finalize`. In a `combine`, peers load the rows that lie in a buffer, such as outputs and arrays of
            `combine_input`; other rows are sent. A buffer has room for max_recv_tokens rows, or in the exact mode for
            world_size * max_tokens rows. With 0 output buffers, rows are copied from other memory of the layer to new
            arrays; `dispatch_recv` and `redispatch` always copy rows to new arrays. If torch records a call, its
            results are copied from the buffer to new arrays.
        keeps_outputs: with output_buffers: an output of `dispatch` stays valid as long as it is referenced, like a new
            array, also in calls that torch records. A buffer can then be reused when the last array in the buffer has
            been freed. If no buffer is free, the rows of a dispatch pass through an additional buffer, and are copied
            to new arrays. On GPUs the rows are also copied if the arrays are not torch's, if torch is older than 2.8,
            or if the dispatch is captured in a graph or is given a stream. If rows of a combine lie outside the
            buffers, they are copied to the additional buffer, from which peers load them.
        minus_one_drops: whether expert ids are as in DeepEP: int32 or int64 with every layout, and only -1 drops a
            slot. The id num_tot_experts is then out of range.
        capacity: see `DispatchCombineContext.create`.

    Attributes:
        ep_config: sizes and types, which count only the remaining ranks.
        lost_ranks: the argument, sorted.
        layout, max_recv_tokens: as given; max_recv_tokens is the number of padded rows with layout="padded".
        quantized: whether tokens are sent in float8.
        ctx: the buffers and launches.
        forms: the forms of the layer's calls.
        sums_on_own_node: whether a token's own rank sums all rows of the token, so that `combine` takes topk_weights.
        sums_ranks_in_turn: whether `combine` takes order_ids.
        dispatching, combining: the calls in two halves whose second half is pending.

    Raises:
        ArgumentError: an argument is wrong, does not match the group, or differs between ranks.
        CompileError: with use_aot, a kernel was not compiled beforehand.
        ResourceError: no memory or channel ids are left.
    """

    def __init__(
        self,
        ep_group: Any,
        max_tokens: int,
        hidden: int,
        topk: int,
        rank: int,
        num_tot_experts: int,
        local_world_size: int,
        world_size: int,
        dtype: Any = "bfloat16",
        weight_dtype: Any = "float32",
        num_sm: int = 20,
        enable_local_combine: bool = False,
        use_aot: bool = False,
        *,
        max_recv_tokens: int | None = None,
        dispatch_dtype: Any = None,
        scale_elements: int = SCALED_ELEMENTS,
        num_scales: int | None = None,
        scales_by_columns: bool = False,
        layout: str = "expert",
        grows: bool = False,
        lost_ranks: Sequence[int] = (),
        placement: Sequence[int] | None = None,
        expert_alignment: int | None = None,
        output_buffers: int = 0,
        keeps_outputs: bool = False,
        minus_one_drops: bool = False,
        capacity: int = 2,
    ) -> None:
        array_libraries.keep_opaque(EPAll2AllLayer)
        given = {name: value for name, value in locals().items() if name not in ("self", "ep_group")}
        options = LayerOptions(**given)
        members = Members.of(ep_group, options.config)
        with members.closed_on_error():
            self._open(members, options)

    @classmethod
    def _on(cls, members: Members, options: LayerOptions, *described: Any) -> EPAll2AllLayer:
        layer = object.__new__(cls)
        layer._open(members, options, *described)
        return layer

    def _open(self, members: Members, options: LayerOptions, name: str = "", compared: Any = None, *names: Any) -> None:
        name = name or f"a layer with {options.layout!r} rows ({options.config.describe()})"
        number = members.agree_on(compared or options.compared, name)
        options = agree_on_placement(members.group, options)
        ctx = DispatchCombineContext(members, options, number)
        dispatching, combining = UnderWay("dispatch"), UnderWay("combine")
        ctx.workspace.in_halves.append(lambda: dispatching.call is not None or combining.call is not None)
        self._take(LayerParts(ctx, options, *names), dispatching, combining)

    def _take(self, parts: LayerParts, dispatching: UnderWay, combining: UnderWay) -> None:
        options, self.ctx = parts.options, parts.ctx
        self._parts, self.dispatching, self.combining, self.forms = parts, dispatching, combining, Forms(parts)
        self.sums_on_own_node, self.sums_ranks_in_turn = parts.sums_on_own_node, parts.sums_ranks_in_turn
        self.ep_config, self.lost_ranks = options.config, options.lost_ranks
        self.layout, self.max_recv_tokens, self.quantized = options.layout, options.fixed_rows, options.quantized
        self._narrowed: dict[int, EPAll2AllLayer] = {}

    def narrowed(self, max_tokens: int) -> EPAll2AllLayer:
        """Returns a layer for calls of at most max_tokens tokens per rank; all ranks pass the same number. With
        layout="padded" the narrowed layer's outputs have room for its max_tokens tokens from each rank.

        The narrowed layer shares this layer's memory, and is unusable after this layer's `finalize`. One dispatch and
        one combine can be in flight in this layer and its narrowed layers together. A descriptor can be used only with
        the layer that made it. The layers for the latest few values of max_tokens are cached.

        Args:
            max_tokens: from 1 to this layer's max_tokens.
        """
        max_tokens = whole_number("max_tokens", max_tokens, 1, self.ep_config.max_tokens)
        if max_tokens == self.ep_config.max_tokens:
            return self
        found = self._narrowed.pop(max_tokens, None)
        if found is None:
            found = object.__new__(EPAll2AllLayer)
            options = replace(self._parts.options, call_tokens=max_tokens)
            found._take(replace(self._parts, options=options), self.dispatching, self.combining)
            if len(self._narrowed) == _MOST_NARROWED:
                del self._narrowed[next(iter(self._narrowed))]
        self._narrowed[max_tokens] = found
        return found

    def __enter__(self) -> EPAll2AllLayer:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.finalize()

    def __repr__(self) -> str:
        config = self.ep_config
        return (
            f"<EPAll2AllLayer of {config.num_experts} experts on {config.world_size} ranks, top {config.topk}, "
            f"{config.hidden} x {config.token}>"
        )

    def finalize(self) -> None:
        """Releases the layer's memory. All ranks call this together; further calls do nothing."""
        self.ctx.finalize()

    def shrink(self, communicator: Communicator | None = None) -> EPAll2AllLayer:
        """Returns a layer with this layer's options on the remaining ranks. The call works even if no rank has failed.
        All remaining ranks call this together.

        Experts keep their numbers, and the options stay the same. Slots that choose an expert of a lost rank are
        dropped, and `desc.lost_slots` marks them. Tokens that were in flight in this layer must be dispatched again.

        Args:
            communicator: the result of `Communicator.shrink` of this layer's communicator, or of a communicator that
                was shrunk from this layer's. With None, this call shrinks the communicator, and the new layer's
                `finalize` closes the shrunk communicator.

        Raises:
            ArgumentError: `communicator` was not made by `Communicator.shrink`.
            ResourceError: no memory or channel ids are left.
            PeerLostError: a rank was lost during the call, and `communicator` was given. The caller then shrinks
                `communicator`, and calls `shrink` of this layer again with the result. Ranks on which this call had
                succeeded call `shrink` of the new layer instead. With None, this call itself continues without the
                lost rank.
            CommunicatorError: see `Communicator.shrink`.
        """
        if communicator is not None:
            _require_communicator(communicator)
        survivors = self.ctx.communicator.shrink() if communicator is None else communicator
        while True:
            members = Members(survivors, owned=communicator is None)
            with members.closed_on_error():
                numbers = members.group.numbers_in(self.ctx.group)
                if numbers is None:
                    raise ArgumentError("communicator", "must come from layer.ctx.communicator.shrink()")
                left = [self._present[number] for number in numbers]
                lost = [rank for rank in range(self._parts.options.all_ranks) if rank not in left]
                try:
                    return self._on_members(members, lost)
                except PeerLostError:
                    if communicator is not None:
                        raise
                    survivors = survivors.shrink()

    def grow(self, communicator: Communicator, *, lost_ranks: Sequence[int] = ()) -> EPAll2AllLayer:
        """Returns a layer with this layer's options on ranks among which new processes have taken the places of lost
        ranks. All ranks of this layer call this together, while the new processes construct an `EPAll2AllLayer` on
        their communicator, with the same options.

        A new process has the number of a lost rank, and therefore the experts of that rank. This layer stays usable
        until its `finalize`. Descriptors and captured graphs belong to the layer that made them, so the program
        captures the new layer's calls in new graphs.

        Args:
            communicator: the result of `Communicator.grow` of this layer's communicator. The layer's original ranks
                without `lost_ranks`, in ascending order, are its ranks.
            lost_ranks: the original numbers of the ranks that remain lost. The new processes pass the same lost_ranks.

        Raises:
            ArgumentError: `communicator` has a different number of ranks, or gives this rank the place of a different
                rank; or an option differs between ranks.
            ResourceError: no memory or channel ids are left.
            CommunicatorError: a peer failed; see its subclasses. The caller then shrinks `communicator`, and calls
                `grow` of this layer again, with the shrunk communicator and the ranks that are then lost. Ranks on
                which this call had succeeded call `shrink` of the new layer instead.
        """
        _require_communicator(communicator)
        options = self._parts.options
        lost = as_ranks(options.all_ranks, lost_ranks, "lost_ranks")
        left = [rank for rank in range(options.all_ranks) if rank not in lost]
        own, ranks = self._present[options.config.rank], communicator.world_size
        if ranks != len(left):
            raise ArgumentError("communicator", f"has {ranks} ranks; expected {len(left)}, with {len(lost)} still lost")
        if left[communicator.rank] != own:
            what = f"gives this rank, {own}, the place of rank {left[communicator.rank]}"
            raise ArgumentError("communicator", f"{what}; expected every rank to keep its original place")
        return self._on_members(Members(communicator), lost)

    @property
    def placement(self) -> tuple[int, ...] | None:
        """The number of the expert that each place holds, or -1; None if the layer was made without a placement."""
        places = self.ctx.places
        return None if places is None else places.placement

    def place(self, placement: Sequence[int], weights: Sequence[Any] | None = None) -> bool:
        """Changes the placement of a layer that was made with one. All ranks call this together, between a `combine`
        and the next `dispatch`.

        Without `weights`, the placement changes at once. Before the call, each rank's new places must hold the weights
        of their experts. When the call returns, no rank sends tokens to the former places, whose weights may then be
        overwritten. The call waits for the work that is queued on this rank's device.

        With `weights`, the call also moves weights, while the ranks continue their steps with the former placement. The
        ranks repeat the call between steps until it returns True. The first call waits for the queued work, starts to
        read the weights of this rank's new experts from the nearest ranks that have them, and returns False. Each later
        call exchanges a few bytes with the other ranks; if the weights of all ranks have arrived, the call waits for
        the queued work, changes the placement, and returns True.

        During a move, the program must neither change nor free the arrays, and `suspend` may refuse the move's memory.
        A call with another placement, or without `weights`, ends the move. So do `finalize`, `grow`, and an error that
        leaves the communicator usable. The former placement then stays valid, but the contents of empty places are
        undefined. After a CommunicatorError, `shrink` completes the move if another rank has completed it, and
        otherwise ends it. To repeat a move, call `place` again, after `shrink` or `grow` of the new layer.

        Weights for empty places are written directly, and weights for places in use arrive in a buffer. Until the end
        of a move, a rank's buffers take as much memory as its places in use that get another expert. To need less
        memory, move fewer places at a time.

        Captured graphs use the new placement from their next launch on. If a rank is lost during the call, `shrink`
        returns a layer in which all ranks have the same placement, the former or the new placement, and its weights.

        Args:
            placement: as for the constructor, with the same number of experts; the same on all ranks.
            weights: None, or a sequence of contiguous arrays in host or device memory whose first dimension is this
                rank's places, such as w13, w2 and their scales. All ranks pass arrays with rows of the same sizes, and
                each rank passes the same arrays in all calls of a move.

        Returns:
            Whether the placement has changed; the same on all ranks.

        Raises:
            ArgumentError: an argument is wrong or differs between ranks, or no remaining rank has the weights of an
                expert, and no rank has changed its placement; or the layer was made without a placement, or a call in
                two halves is under way.
            TransferError: this rank or another rank can't get its weights, and no rank has changed its placement. The
                other ranks' error names this rank and the reason. This rank raises the error itself, which may also be
                a ResourceError or MemoryError.
            CommunicatorError: a peer failed; see its subclasses.
        """
        self._end_earlier(self.dispatching)
        self._end_earlier(self.combining)
        if self.placement is None or self.ctx.places is None:
            raise ArgumentError("placement", "the layer was made without one; pass `placement` to EPAll2AllLayer")
        return self.ctx.places.place(placement, weights)

    @property
    def _present(self) -> list[int]:
        """The original numbers of this layer's ranks."""
        return [rank for rank in range(self._parts.options.all_ranks) if rank not in self.lost_ranks]

    def _on_members(self, members: Members, lost_ranks: Sequence[int]) -> EPAll2AllLayer:
        """Returns a layer with this layer's other options on other ranks."""
        group, places = members.group, self.ctx.places
        options = replace(
            self._parts.options,
            rank=group.rank,
            local_world_size=node_size(group),
            world_size=group.world_size,
            lost_ranks=lost_ranks,
            placement=self.placement,
            placed=0 if places is None else places.turns,
        )
        layer = EPAll2AllLayer._on(members, options)
        if places is not None:
            places.hand_over(group, layer.placement)
        return layer

    def ep_barrier_all(self, stream: StreamLike = None, intra_node_only: bool = False) -> None:
        """Waits on the stream until all ranks have made this call.

        Args:
            stream: as for `Communicator.barrier`.
            intra_node_only: wait only for the ranks of this node; all ranks of the group must make this call
                nevertheless.
        """
        self.ctx.require_usable()
        barrier(self.ctx.communicator.collectives, stream, intra_node_only=intra_node_only)

    # -- dispatch ---

    def dispatch(
        self,
        input: Any,
        exp_indices: Any,
        weight: Any = None,
        full_scatter_indices: Any = None,
        *,
        stream: StreamLike = None,
    ) -> tuple[Any, Any, EPAllToAllLayoutDesc]:
        """Sends each token to its experts.

        Args:
            input: [T, hidden] of `dtype`; T from 0 to max_tokens, and may differ between ranks. With dispatch_dtype,
                `input` may also be a pair of rows in float8 and their scales, float32 [T, scales of a row].
            exp_indices: int32 [T, topk]: the experts of each token. Each entry of `exp_indices` is a slot. A slot with
                the id `num_tot_experts` (with `placement`: the number of experts) is dropped: nothing is sent for it,
                and it adds zero in `combine`. A slot whose expert's ranks are lost is dropped. With layout="rank" ids
                may also be int64, and a slot with the id -1 is dropped. See also minus_one_drops. With layout="padded"
                a token that chooses an expert twice takes two of the expert's rows.
            weight: [T, topk] of `weight_dtype`, to send with the tokens; or None. All ranks or none pass weights.
            full_scatter_indices: int32 [tokens of all ranks, topk], or None: the row of every slot. Tokens and rows are
                numbered over all ranks, in the order of ranks. For each rank, the entries must be a permutation of the
                rank's rows. full_scatter_indices can't be given with layout="rank" or "padded", or with
                expert_alignment.
            stream: where to queue the call; as for `Communicator.all_reduce`.

        Returns:
            The rows, [R, hidden]: one for each slot of this rank's experts, ordered by expert, then the source's rank,
            then token, then k, unless full_scatter_indices give a different order; their weights, [R], or None; and the
            descriptor. With dispatch_dtype the rows are a pair, [R, hidden] of float8 and float32 [R, scales of a row].
            With max_recv_tokens the arrays have max_recv_tokens rows, of which the first `desc.num_recv_tokens` are
            filled.

            With layout="rank" there is one row for each token that has an expert on this rank, ordered by the source's
            rank, then token. The rows' weights are [R, topk], zero where `desc.local_expert_ids` is -1. With
            layout="padded" all shapes have [experts of this rank, world_size * max_tokens] in place of R. Of each
            expert the first `desc.expert_rows` rows are filled, ordered by the source's rank, then token.

        Raises:
            ArgumentError: an argument is wrong on this rank, and the call had no effect; or an expert id of any rank is
                out of range, in which case all ranks raise the error, and the layer stays usable.
            CapacityError: a rank received more rows than max_recv_tokens, or with layout="padded" an expert received
                more rows than it has room for; see `check`. With `grows`, also raised if a rank has more than
                max_tokens tokens.
            MismatchError: another rank makes a different call.
            CommunicatorError: a peer failed; see its subclasses.
        """
        recorder = recorder_of_dispatch(self._parts.options, input, weight)
        if recorder is None:
            return self.dispatch_unrecorded(input, exp_indices, weight, full_scatter_indices, stream)
        self._end_earlier(self.dispatching)
        # The rows of a recorded call are copied, because later dispatches must not overwrite rows for a backward pass.
        forms = self.forms.dispatches[self._parts.options.keeps_outputs]

        def call() -> Any:
            return self._parts.checked(forms.call(input, exp_indices, weight, full_scatter_indices, stream), stream)

        return recorder.dispatch(self, call, input, weight)

    def dispatch_unrecorded(
        self, input: Any, exp_indices: Any, weight: Any = None, scatter: Any = None, stream: StreamLike = None
    ) -> Dispatched:
        """Makes a `dispatch` without recording it for a backward pass."""
        if self.ctx.closed or self.dispatching.call is not None:
            self._end_earlier(self.dispatching)
        made = self.forms.dispatches[True].call(input, exp_indices, weight, scatter, stream)
        dispatched: Dispatched = self._parts.checked(made, stream)
        return dispatched

    def send_unrecorded(
        self, input: Any, exp_indices: Any, weight: Any = None, scatter: Any = None, stream: StreamLike = None
    ) -> SentCall:
        """Makes a `dispatch_send` without recording it for a backward pass."""
        self._end_earlier(self.dispatching)
        sent: SentCall = self.forms.sends.call(input, exp_indices, weight, scatter, stream)
        self.dispatching.call = sent
        return sent

    def dispatch_send(
        self,
        input: Any,
        exp_indices: Any,
        weight: Any = None,
        full_scatter_indices: Any = None,
        *,
        stream: StreamLike = None,
    ) -> SentCall:
        """Makes the first half of `dispatch`: queues the sends, without waiting.

        The arguments must not change until `dispatch_recv`. One dispatch can be in flight at a time.
        """
        recorder = recorder_of_dispatch(self._parts.options, input, weight)
        sent = self.send_unrecorded(input, exp_indices, weight, full_scatter_indices, stream)
        if recorder is not None:
            sent.recorded = input, weight
        return sent

    def dispatch_recv(self, pending: SentCall, *, stream: StreamLike = None) -> tuple[Any, Any, EPAllToAllLayoutDesc]:
        """Makes the second half of `dispatch`: receives the rows. Returns the results of `dispatch`, and raises its
        errors.
        """
        self._require_pending(pending, self.dispatching)
        stream = pending.stream if stream is None else stream
        self._parts.refuse_capture(stream)
        recorder = recorder_of(*pending.recorded)
        self.dispatching.call = self.dispatching.end = None
        if recorder is None:
            return self._receive(pending, stream)
        return recorder.dispatch(self, lambda: self._receive(pending, stream), *pending.recorded)

    def _receive(self, pending: SentCall, stream: StreamLike) -> Dispatched:
        received: Dispatched = self._parts.checked(pending.receive(stream), stream)
        return received

    def redispatch(self, input: Any, ep_a2a_layout_desc: EPAllToAllLayoutDesc, *, stream: StreamLike = None) -> Any:
        """Sends new values for the tokens of an earlier dispatch, with the routing of that dispatch. The call does not
        count the rows again.

        `redispatch` is the adjoint of `combine`.

        Args:
            input: [T, hidden] of `dtype`; or with dispatch_dtype a pair, as for `dispatch`.
            ep_a2a_layout_desc: the descriptor of a dispatch of this layer.
            stream: as for `dispatch`.

        Returns:
            The rows, in the order of the earlier dispatch's rows; if `input` is a pair, a pair of rows and scales.
        """
        desc = self._parts.own_desc(ep_a2a_layout_desc)
        self._end_earlier(self.dispatching)
        recorder = recorder_of_dispatch(self._parts.options, input)
        if recorder is None:
            return self.forms.redispatches.call(input, desc, stream, None)
        return recorder.redispatch(self, lambda: self.forms.redispatches.call(input, desc, stream, None), input, desc)

    # -- combine ---

    def combine(
        self,
        input: Any,
        ep_a2a_layout_desc: EPAllToAllLayoutDesc,
        *,
        weights: Any = None,
        topk_weights: Any = None,
        added: Sequence[Any] = (),
        order_ids: Any = None,
        out: Any = None,
        stream: StreamLike = None,
    ) -> Any:
        """Sends the experts' rows back, and sums the rows of each token.

        On one node, rows are added in the order of k, or with layout="rank" in the order of ranks. Sums are in float32
        (float64 for rows of float64), and are rounded once. With enable_local_combine, each rank's partial sum is
        rounded, and the partial sums are added in the order of ranks. Between nodes, each node's partial sum is
        rounded, and the partial sums are added in the order of nodes.

        Args:
            input: [R, hidden] of `dtype`, in the order of the dispatch's output.
            ep_a2a_layout_desc: the descriptor of that dispatch.
            weights: float32 [R]: the factor of each row in the sum, such as the weights that the dispatch returned;
                None for 1. Either all ranks pass weights, or none.
            topk_weights: float32 [T, topk], instead of `weights`: the factor of each slot of this rank's tokens,
                which this rank applies when it sums. `topk_weights` can be given only if all ranks reach each other's
                memory, and without enable_local_combine.
            added: up to two arrays [T, hidden] of `dtype`, with which each sum begins. The arrays `added` get no
                gradients.
            order_ids: the expert ids of the dispatch, [T, topk]. If a token has experts on several ranks, each of these
                ranks contributes one row, and the rows are added in the order of their ranks' last slots k. `order_ids`
                can be given only on one node, with layout="rank" or enable_local_combine, and without lost ranks and
                `placement`.
            out: [T, hidden], or None for a new array. `out` may be one of the arrays of `added`, and overlaps no other
                array of the call.
            stream: as for `dispatch`.

        Returns:
            `out`, or the new array. Raises the errors of `dispatch`.
        """
        recorder = recorder_of_combine(self._parts.options, input, weights, topk_weights)
        given = input, weights, topk_weights, order_ids, tuple(added), ep_a2a_layout_desc, out, stream
        if recorder is None:
            return self.combine_unrecorded(*given)
        if out is not None:
            refuse_recording("out")
        desc = self._parts.own_desc(ep_a2a_layout_desc)
        return recorder.combine(self, lambda: self.combine_unrecorded(*given), input, weights, desc)

    def combine_unrecorded(self, *given: Any) -> Any:
        """Makes a `combine` without recording it for a backward pass.

        Args:
            given: all of input, weights, topk_weights, order_ids, added, the descriptor, out and stream.
        """
        if self.ctx.closed or self.combining.call is not None:
            self._end_earlier(self.combining)
        return self.forms.combines.call(*given)

    def send_back_unrecorded(
        self, input: Any, weights: Any, topk_weights: Any, desc: Any, stream: Any, after: RowSignals | None = None
    ) -> SentCall:
        """Makes a `combine_send` without recording it for a backward pass. With `after`, another kernel on another
        stream may still compute the rows.
        """
        self._end_earlier(self.combining)
        returns = self.forms.returns
        if after is not None:
            self.forms.signals.set(after, self._parts.options.padded_rows, self.ctx.blocks)
            returns = self.forms.signalled_returns
        sent: SentCall = returns.call(input, weights, topk_weights, None, (), desc, None, stream)
        self.combining.call = sent
        return sent

    def combine_input(self, ep_a2a_layout_desc: EPAllToAllLayoutDesc) -> Any:
        """Returns an array for the experts' results, [R, hidden] of `dtype`. With output_buffers the array lies in a
        buffer, from which peers load rows in `combine`, so that no rows are sent. All calls return an array in the same
        buffer, which is free again after `combine`. But with keeps_outputs the array stays valid, and lies outside the
        buffers if no buffer is free.

        Args:
            ep_a2a_layout_desc: the descriptor of the dispatch.
        """
        desc = self._parts.own_desc(ep_a2a_layout_desc)
        config, outputs, arrays = self.ep_config, self.ctx.workspace.outputs, self.ctx.arrays.like(desc.like)
        shape, native = (*self._parts.leading(desc.rows), config.hidden), arrays.type_of(config.token)
        if outputs is not None:
            # For libraries other than torch, the current stream is not known at this point.
            on_current = arrays.is_torch and self._parts.outlives_no_graph(self.ctx.stream_for(None, desc.like))
            taken = outputs.take_for_combine(arrays, config.token, on_current_stream=on_current)
            if taken.whole is not None:
                return arrays.part(taken.whole, 0, shape, strides_of(shape), native)
        return arrays.maker(shape, strides_of(shape), native)()

    def combine_send(
        self,
        input: Any,
        ep_a2a_layout_desc: EPAllToAllLayoutDesc,
        *,
        weights: Any = None,
        topk_weights: Any = None,
        stream: StreamLike = None,
    ) -> SentCall:
        """Makes the first half of `combine`: queues the sends, without waiting.

        `input` and the weights must not change until `combine_recv`. One combine can be in flight at a time.
        """
        recorder = recorder_of_combine(self._parts.options, input, weights, topk_weights)
        sent = self.send_back_unrecorded(input, weights, topk_weights, ep_a2a_layout_desc, stream)
        if recorder is not None:
            sent.recorded = input, weights
        return sent

    def combine_recv(self, pending: SentCall, *, out: Any = None, stream: StreamLike = None) -> Any:
        """Makes the second half of `combine`: sums the received rows. Returns the result of `combine`, and raises its
        errors.
        """
        self._require_pending(pending, self.combining)
        recorder = recorder_of(*pending.recorded)
        if recorder is not None and out is not None:
            refuse_recording("out")
        stream, combining = pending.stream if stream is None else stream, self.combining
        end, combining.call, combining.end = combining.end, None, None
        try:
            if recorder is None:
                return pending.receive(stream, out)
            rows, weights = pending.recorded
            return recorder.combine(self, lambda: pending.receive(stream), rows, weights, pending.desc)
        except ArgumentError:  # the call had no effect, so the combine is still under way
            combining.call, combining.end = pending, end
            raise

    def combine_weights(
        self, input: Any, ep_a2a_layout_desc: EPAllToAllLayoutDesc, *, stream: StreamLike = None
    ) -> Any:
        """Sends one number for each slot from the rank of the slot's expert back to the token's rank.

        Args:
            input: float32 [R]: the number of each row. With layout="rank" [R, topk], zero where `local_expert_ids` is
                -1. If `input` is the weights that the dispatch returned, the result equals the dispatch's `weight`,
                except for dropped slots.
            ep_a2a_layout_desc: the descriptor of the dispatch.
            stream: as for `dispatch`.

        Returns:
            float32 [T, topk], zero for dropped slots. Raises the errors of `dispatch`.
        """
        if self.ep_config.weight.name != "float32":
            raise ArgumentError("combine_weights", f"needs weight_dtype float32, not {self.ep_config.weight}")
        desc = self._parts.own_desc(ep_a2a_layout_desc)
        if self.combining.call is not None:
            raise ArgumentError("combine_weights", "a combine is under way; call combine_recv first")
        by_rank = self.layout == "rank"
        shape = (desc.rows, self.ep_config.topk) if by_rank else self._parts.leading(desc.rows)
        values = input_array(self.ctx.group, input, "input", shape, "float32")
        return self.forms.collect(values, desc, self.ctx.stream_for(stream, input))

    def weights_by_row(self, topk_weights: Any, ep_a2a_layout_desc: EPAllToAllLayoutDesc) -> Any:
        """Sends the weights of this rank's slots to their rows, for a later `combine`. Takes only torch tensors.

        Args:
            topk_weights: float32 [T, topk].
            ep_a2a_layout_desc: the descriptor of the dispatch.

        Returns:
            float32 [R]: each row's weight. With layout="rank" [R, topk], zero where `local_expert_ids` is -1. Raises as
            `dispatch`.
        """
        desc = self._parts.own_desc(ep_a2a_layout_desc)
        self._end_earlier(self.dispatching)
        topk = self.ep_config.topk
        # Every row gets all weights of its token, including the weight of the row's slot.
        spread = self.forms.spreads.call(topk_weights, desc, None, None)
        if self.layout == "rank":
            return spread.masked_fill_(desc.local_expert_ids < 0, 0)
        slots = desc.row_slots.clamp(0, topk - 1).long().view(*self._parts.leading(desc.rows), 1)
        return spread.gather(-1, slots).squeeze(-1)

    # -- checking ---

    def check(self) -> None:
        """Raises the errors of the dispatches that have completed since the last check. All ranks that have waited for
        these dispatches raise the same errors.

        With max_recv_tokens only this call raises these errors, because `dispatch` does not wait.

        Raises:
            CapacityError: a rank received more rows than max_recv_tokens, or with layout="padded" an expert received
                more rows than it has room for, because tokens chose the expert twice. Rows that did not fit were
                dropped, and `combine` adds zero for them. The error's `needed` is the largest number of rows that a
                rank, or an expert, received.
            ArgumentError: an expert id was out of range, and its slot was dropped; or full_scatter_indices were not a
                permutation, or covered fewer tokens than the ranks have. Only ranks whose rows are affected raise the
                error about full_scatter_indices.
        """
        self.ctx.group.failure.require_usable()  # not `require_awake`: other ranks may not make this call
        self.ctx.require_usable()
        self._parts.check_ended()

    def _end_earlier(self, under_way: UnderWay) -> None:
        """Ends a call whose second half is pending, before the next call of the same name begins."""
        if self.ctx.closed or under_way.call is not None:  # the launch itself checks for failed ranks
            self.ctx.require_usable()
            if under_way.end is None:
                name = under_way.name
                raise ArgumentError(name, f"another {name} is under way; call {name}_recv first")
            under_way.end()

    def _require_pending(self, pending: SentCall, under_way: UnderWay) -> None:
        self.ctx.require_usable()
        if pending is not under_way.call or pending is None:
            raise ArgumentError("pending", f"is not the {under_way.name} of this layer that is under way")
