"""EPAll2AllLayer: the all-to-all of a mixture of experts, from tokens to experts and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from proxyccl.channels.arguments import input_view
from proxyccl.channels.collectives.barrier import barrier
from proxyccl.channels.communicator import Communicator
from proxyccl.channels.expert_parallel.arguments import index_array, input_array, output_array
from proxyccl.channels.expert_parallel.arrays import first_rows
from proxyccl.channels.expert_parallel.config import MAX_CHOSEN_PER_RANK, MAX_SLOTS, EPConfig
from proxyccl.channels.expert_parallel.context import (
    GATHER,
    LAYOUT,
    MINUS_ONE_DROPS,
    NUMBER_DROPS,
    RECEIVE,
    ROUTE,
    SCALED_ELEMENTS,
    SEND,
    DispatchCombineContext,
    DispatchInputs,
    agree_on,
    as_communicator,
    closing_on_error,
    node_size,
)
from proxyccl.channels.expert_parallel.geometry import OutputLayout
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.numbers import whole_number
from proxyccl.channels.expert_parallel.output_buffers import NO_BUFFER, TakenBuffer
from proxyccl.channels.expert_parallel.recording import Recorder, recorder_of
from proxyccl.channels.expert_parallel.survivors import SurvivingExperts, experts_left, lost_ranks_of
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.errors import ArgumentError, CapacityError, ProxyCCLError
from proxyccl.device.runtime import StreamLike

_FLOAT8 = "float8_e4m3fn"
_SCALES_ALIGNMENT = 16  # where a row's scales begin
_LAYOUTS = ("expert", "rank", "padded")
MOST_BUFFERS = 64
"""The most output buffers of a layer."""
_OWN_NAMES = {"token_dtype": "dtype", "num_experts": "num_tot_experts"}  # the layer's names for fields of EPConfig


@dataclass(frozen=True)
class _Output:
    """Arrays for the caller.

    Attributes:
        rows, weights: as `dispatch` returns them.
        views: where a dispatch puts rows, weights and scales.
        copies: what is then to be copied, each to an address, from an address, so many bytes.
    """

    rows: Any
    weights: Any
    views: tuple[ArrayView | None, ...]
    copies: tuple[tuple[int, int, int], ...] = ()

    def first(self, rows: int) -> _Output:
        """The first rows alone, of arrays that are not copied."""
        pair = isinstance(self.rows, tuple)
        values = tuple(first_rows(part, rows) for part in self.rows) if pair else first_rows(self.rows, rows)
        weights = None if self.weights is None else first_rows(self.weights, rows)
        views = tuple(view and replace(view, shape=(rows, *view.shape[1:])) for view in self.views)
        return _Output(values, weights, views)


@dataclass(frozen=True)
class PendingDispatch:
    """A dispatch that was sent; `EPAll2AllLayer.dispatch_recv` takes it.

    Attributes:
        desc: the descriptor, filled by `dispatch_recv`.
        output: with a fixed number of rows, what `dispatch_recv` will fill and return; else None.
        recorded: the caller's tokens and weights, if torch records the call.
        taken: the output buffer to which the rows go.
    """

    desc: EPAllToAllLayoutDesc
    inputs: DispatchInputs
    stream: StreamLike
    output: _Output | None = None
    recorded: tuple[Any, Any] | None = None
    taken: TakenBuffer = NO_BUFFER


@dataclass(frozen=True)
class PendingCombine:
    """A combine that was sent; `EPAll2AllLayer.combine_recv` takes it."""

    desc: EPAllToAllLayoutDesc
    rows: ArrayView
    weights: ArrayView | None
    stream: StreamLike
    topk_weights: ArrayView | None = None
    recorded: tuple[Any, Any] | None = None


class EPAll2AllLayer:
    """Sends tokens to the ranks of their experts, and sums the experts' results.

    Each token's row goes once to every rank of its node that has one of its experts, and once to each other node that
    has one. The receiver copies it to the rows of its experts. All ranks construct the layer together and make the same
    calls in the same order; their numbers of tokens may differ.

    Calls are queued on the caller's stream. Without `max_recv_tokens` (the exact mode) `dispatch` waits on the CPU for
    the number of received rows, but not for the rows. With it, `dispatch` does not wait and can be captured in a graph.

    If torch records gradients and an input requires one, `dispatch`, `redispatch` and `combine` are recorded, also in
    two halves. This must be so on all ranks or on none, since the backward pass calls the layer too, in whole calls.
    Dispatches in float8 and layout="padded" are not recorded.

    Args:
        ep_group: a `Communicator`, an MPI communicator or a torch process group. For the last two the layer makes a
            Communicator, which `finalize` closes.
        max_tokens: the most tokens of one rank in one dispatch.
        hidden: elements of a token.
        topk: experts that each token chooses, 1 to 16.
        rank: this rank in the group.
        num_tot_experts: experts of all ranks together; rank r has the r-th share of them.
        local_world_size: ranks of a node; 1 if nodes have different numbers of ranks.
        world_size: ranks of the group.
        dtype: of tokens: "bfloat16", "float16", "float32" or "float64", by name or torch's or numpy's type.
        weight_dtype: of routing weights: one of the same.
        num_sm: the most blocks, and so the most multiprocessors, that a kernel of the layer uses.
        enable_local_combine: sum a token's rows on each rank first, rounded to `dtype`. This sends less data, but
            rounds the result twice. Only on one node.
        use_aot: use only kernels that were compiled beforehand (`proxyccl compile`).
        max_recv_tokens: the number of rows of every output; None for outputs of the exact size.
        dispatch_dtype: None to send tokens as they are, or "float8_e4m3fn" to send them in float8: each 128 elements
            of a row share a float32 scale, and element times scale is the value. `combine` keeps to `dtype`.
        scale_elements: how many elements share a scale. With another number than 128 the layer makes no float8 rows;
            callers give pairs. Scales are any 4 bytes: four packed exponents (UE8M0) for 512 elements, for example.
        grows: in the exact mode, a rank with more than max_tokens tokens makes `dispatch` raise CapacityError on all
            ranks, with the most tokens of any rank in `needed`; the layer stays usable. Else that rank alone raises
            ArgumentError.
        layout: "expert" for a row for each slot, ordered by expert; "rank" for one row for each token that has an
            expert on this rank, ordered by source rank and token. The program then finds its experts in
            `desc.local_expert_ids`. "padded", for few tokens, gives each expert room for what all ranks may send it,
            world_size * max_tokens rows; `desc.expert_rows` says how many came. Nothing waits on the CPU then.
        lost_ranks: the ranks that the group has lost, by their numbers when all were there; see `shrink`. The group's
            rank r is then the r-th of those that are left, and has that one's experts. num_tot_experts counts the
            experts of all, also of the lost. A slot that chooses an expert of a lost rank is dropped, and
            `desc.lost_slots` tells which were.
        expert_alignment: with layout="expert", each expert's rows begin at a multiple of it, so outputs have gaps,
            whose rows are not written; `desc.row_slots` is -1 there. In the exact mode `desc.num_tokens_per_expert`
            then tells how many rows each expert has. None for neither.
        output_buffers: with layout="rank": for how many outputs the layer has memory. On one node whose ranks reach
            each other's memory, senders then store rows right where the caller reads them. What `dispatch` returned
            stays as it is until that many calls of `dispatch` later, and is gone after `finalize`. `combine` loads rows
            that lie in that memory, as outputs and what `combine_input` gives do; others are sent. Each output takes
            room for max_recv_tokens rows, or world_size * max_tokens. 0: outputs are new arrays, whose rows pass
            through other memory of the layer; so are those of `dispatch_recv`, of `redispatch`, and what torch records.
        keeps_outputs: with output_buffers: what `dispatch` returned stays as long as somebody has it, as new arrays do,
            also what torch records. A buffer is then free again when the last array in it is gone. Where none is, the
            rows of a dispatch pass one more, and are copied to new arrays. On GPUs so do those in arrays of other
            libraries than torch 2.8 or later, and of dispatches that are captured in a graph or given a stream. Rows of
            a combine that lie elsewhere are copied to that buffer, and loaded too.
        minus_one_drops: expert ids are as DeepEP's callers give them: int32 or int64 with every layout, and -1 alone
            drops a slot. The id num_tot_experts is out of range then.
        capacity: see `DispatchCombineContext.create`.

    Attributes:
        ep_config: sizes and types; with lost_ranks those of the ranks that are left.
        lost_ranks: as given, in order.
        layout, max_recv_tokens: as given; max_recv_tokens is the number of padded rows with layout="padded".
        quantized: whether tokens are sent in float8.
        ctx: the buffers and launches.

    Raises:
        ArgumentError: an argument is wrong, is not the group's, or differs between ranks.
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
        layout: str = "expert",
        grows: bool = False,
        lost_ranks: Sequence[int] = (),
        expert_alignment: int | None = None,
        output_buffers: int = 0,
        keeps_outputs: bool = False,
        minus_one_drops: bool = False,
        capacity: int = 2,
    ) -> None:
        self._remade = functools.partial(
            EPAll2AllLayer,
            max_tokens=max_tokens,
            hidden=hidden,
            topk=topk,
            num_tot_experts=num_tot_experts,
            dtype=dtype,
            weight_dtype=weight_dtype,
            num_sm=num_sm,
            enable_local_combine=enable_local_combine,
            use_aot=use_aot,
            max_recv_tokens=max_recv_tokens,
            dispatch_dtype=dispatch_dtype,
            scale_elements=scale_elements,
            layout=layout,
            grows=grows,
            expert_alignment=expert_alignment,
            output_buffers=output_buffers,
            keeps_outputs=keeps_outputs,
            minus_one_drops=minus_one_drops,
            capacity=capacity,
        )
        world_size = whole_number("world_size", world_size, 1)
        self.lost_ranks = lost = lost_ranks_of(lost_ranks, world_size)
        if lost:
            num_tot_experts = whole_number("num_tot_experts", num_tot_experts, 1)
            num_tot_experts = experts_left(num_tot_experts, world_size, len(lost))
        try:
            config = EPConfig(
                max_tokens=max_tokens,
                hidden=hidden,
                topk=topk,
                num_experts=num_tot_experts,
                rank=rank,
                world_size=world_size,
                local_world_size=local_world_size,
                token_dtype=dtype,
                weight_dtype=weight_dtype,
            )
        except ArgumentError as error:
            if error.argument not in _OWN_NAMES:
                raise
            message = str(error).removeprefix(f"{error.argument}: ")
            raise ArgumentError(_OWN_NAMES[error.argument], message) from None
        if enable_local_combine and not config.is_intra_node:
            raise ArgumentError("enable_local_combine", "is only for one node; across nodes each node sends a sum")
        max_tokens, hidden, topk = config.max_tokens, config.hidden, config.topk
        if max_recv_tokens is not None:
            max_recv_tokens = whole_number("max_recv_tokens", max_recv_tokens, 1, MAX_SLOTS)
            config.require_room(max_recv_tokens, "max_recv_tokens")
        scale_elements = whole_number("scale_elements", scale_elements, 1)
        if dispatch_dtype is not None:
            if as_dtype(dispatch_dtype, "dispatch_dtype").name != _FLOAT8:
                raise ArgumentError("dispatch_dtype", f"must be None or {_FLOAT8}, not {dispatch_dtype!r}")
            if hidden % scale_elements or hidden % _SCALES_ALIGNMENT:
                raise ArgumentError(
                    "hidden",
                    f"must be a multiple of {_SCALES_ALIGNMENT}, and of {scale_elements}, the elements that share a "
                    f"scale, not {hidden}",
                )
        if not isinstance(layout, str) or layout not in _LAYOUTS:
            raise ArgumentError("layout", f"must be one of {', '.join(_LAYOUTS)}, not {layout!r}")
        if expert_alignment is not None:
            expert_alignment = whole_number("expert_alignment", expert_alignment, 1)
            if layout != "expert":
                raise ArgumentError("expert_alignment", f'needs layout="expert", not "{layout}"')
            if config.num_experts_per_rank * expert_alignment > MAX_SLOTS - world_size * max_tokens * topk:
                raise ArgumentError("expert_alignment", f"{expert_alignment} makes too many rows")
        all_ranks = world_size + len(lost)
        padded_rows = all_ranks * max_tokens if layout == "padded" else 0
        if padded_rows:
            if max_recv_tokens is not None:
                raise ArgumentError("max_recv_tokens", 'can\'t be given with layout="padded", which has its own')
            max_recv_tokens = config.num_experts_per_rank * padded_rows
            if max_recv_tokens > MAX_SLOTS:
                raise ArgumentError(
                    "max_tokens",
                    f"{max_tokens} tokens of {all_ranks} ranks for each of {config.num_experts_per_rank} experts make "
                    f"too many padded rows; expected at most {MAX_SLOTS}",
                )
            config.require_room(max_recv_tokens, "max_tokens")
        self.layout = layout
        self._rows_shape = (config.num_experts_per_rank, padded_rows) if padded_rows else None
        chosen_per_rank = config.num_experts_per_rank if layout == "rank" else 0
        if chosen_per_rank:
            if config.weight.name != "float32":
                raise ArgumentError("weight_dtype", f'must be float32 with layout="rank", not {config.weight}')
            if chosen_per_rank > MAX_CHOSEN_PER_RANK:
                raise ArgumentError(
                    "num_tot_experts",
                    f'must be at most {MAX_CHOSEN_PER_RANK} of each rank with layout="rank", not {chosen_per_rank}',
                )
        output_buffers = whole_number("output_buffers", output_buffers, 0, MOST_BUFFERS)
        num_sm = whole_number("num_sm", num_sm, 1)
        if output_buffers and layout != "rank":
            raise ArgumentError("output_buffers", 'needs layout="rank"')
        if keeps_outputs and not output_buffers:
            raise ArgumentError("keeps_outputs", "needs output_buffers")
        communicator, owned = as_communicator(ep_group, config)
        options = {
            "num_sm": num_sm,
            "enable_local_combine": bool(enable_local_combine),
            "max_recv_tokens": max_recv_tokens,
            "dispatch_dtype": None if dispatch_dtype is None else _FLOAT8,
            "layout": layout,
            "scale_elements": scale_elements,
            "grows": bool(grows),
            "lost_ranks": str(lost),
            "expert_alignment": expert_alignment,
            "output_buffers": output_buffers,
            "keeps_outputs": bool(keeps_outputs),
            "minus_one_drops": bool(minus_one_drops),
        }
        dropping_ids = NUMBER_DROPS | MINUS_ONE_DROPS if layout == "rank" else NUMBER_DROPS
        if minus_one_drops:
            dropping_ids = MINUS_ONE_DROPS
        self._takes_wide_ids = bool(minus_one_drops) or layout == "rank"
        self.ep_config = config
        self._most_rows = world_size * max_tokens  # with layout="rank"
        self._padded_rows = padded_rows
        self._num_tot_experts = config.num_experts_per_rank * all_ranks
        self.max_recv_tokens = max_recv_tokens
        self.quantized = dispatch_dtype is not None
        self._grows = bool(grows) and max_recv_tokens is None
        self._scale_elements = scale_elements
        with closing_on_error(communicator, owned=owned):
            agree_on(communicator.group, config, options, _OWN_NAMES)
            self.ctx = DispatchCombineContext(
                communicator,
                replace(config, num_experts=config.world_size) if chosen_per_rank else config,
                capacity=capacity,
                num_sm=num_sm,
                local_combine=bool(enable_local_combine),
                owns_communicator=owned,
                scale_elements=scale_elements if self.quantized else 0,
                use_aot=bool(use_aot),
                dropping_ids=dropping_ids,
                layout=OutputLayout(
                    chosen_per_rank=chosen_per_rank,
                    padded_rows=padded_rows,
                    expert_alignment=expert_alignment or 0,
                    # One more: for combine_input, or to pass rows through.
                    buffers=output_buffers + 1 if output_buffers else 0,
                    buffer_rows=max_recv_tokens or self._most_rows,
                    exact_rows=max_recv_tokens is None,
                    stays=bool(keeps_outputs),
                ),
            )
        self._keeps_outputs = bool(keeps_outputs)
        self._surviving: SurvivingExperts | None = None
        if lost:
            self._surviving = SurvivingExperts(
                self.ctx.group,
                self.lost_ranks,
                config.num_experts_per_rank,
                dropping_ids=dropping_ids,
                grid=self.ctx.grid,
                use_aot=bool(use_aot),
            )
        self._sent: PendingDispatch | None = None
        self._returned: PendingCombine | None = None

    def __enter__(self) -> EPAll2AllLayer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finalize()

    def __repr__(self) -> str:
        config = self.ep_config
        return (
            f"<EPAll2AllLayer of {config.num_experts} experts on {config.world_size} ranks, top {config.topk}, "
            f"{config.hidden} x {config.token}>"
        )

    def finalize(self) -> None:
        """Releases the layer's memory. All ranks call it together; calling it twice does nothing."""
        self.ctx.finalize()

    def shrink(self, communicator: Communicator | None = None) -> EPAll2AllLayer:
        """The same layer on the ranks that are left, after a failure or without one. All of them call this together.

        Experts keep their numbers, and all options stay. Slots that choose an expert of a lost rank are dropped, which
        `desc.lost_slots` tells. Tokens that were under way in this layer when it failed must be dispatched again.

        Args:
            communicator: what `Communicator.shrink` of this layer's communicator gave. None to shrink that here; the
                new layer's `finalize` then closes what this gives.

        Raises:
            ArgumentError: `communicator` was not shrunk from another.
            ResourceError: no memory or channel ids are left.
            CommunicatorError: see `Communicator.shrink`.
        """
        if communicator is not None and not isinstance(communicator, Communicator):
            raise ArgumentError("communicator", f"must be a Communicator or None, not {type(communicator).__name__}")
        survivors = self.ctx.communicator.shrink() if communicator is None else communicator
        with closing_on_error(survivors, owned=communicator is None):
            all_ranks = range(self.ep_config.world_size + len(self.lost_ranks))
            present = [rank for rank in all_ranks if rank not in self.lost_ranks]
            if not survivors.members or max(survivors.members) >= len(present):
                raise ArgumentError("communicator", "must be what shrink of the layer's communicator gave")
            left = {present[member] for member in survivors.members}
            layer: EPAll2AllLayer = self._remade(
                survivors,
                rank=survivors.rank,
                local_world_size=node_size(survivors),
                world_size=survivors.world_size,
                lost_ranks=[rank for rank in all_ranks if rank not in left],
            )
        layer.ctx.owns_communicator = communicator is None
        return layer

    def ep_barrier_all(self, stream: StreamLike = None, intra_node_only: bool = False) -> None:
        """Waits on the stream until all ranks have made this call.

        Args:
            stream: as for `Communicator.barrier`.
            intra_node_only: wait only for the ranks of this node. All ranks of the group must call it even so.
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
            input: [T, hidden] of `dtype`; T from 0 to max_tokens, and may differ between ranks. With dispatch_dtype
                also a pair of rows in float8 and their scales, float32 [T, hidden / 128].
            exp_indices: int32 [T, topk]: the experts of each token. The id `num_tot_experts` drops the slot: nothing
                is sent for it, and it adds zero in `combine`. Ids of experts whose ranks are lost do the same. With
                layout="rank" also int64, and -1 drops a slot too. See also minus_one_drops. With layout="padded" a
                token that chooses an expert twice takes two of the expert's rows.
            weight: [T, topk] of `weight_dtype`, to send along; or None. All ranks give it, or none.
            full_scatter_indices: int32 [tokens of all ranks, topk], or None: the row of every slot. Tokens and rows are
                numbered over all ranks, in the order of ranks. For each rank it must be a permutation of the rank's
                rows. Not with layout="rank" or "padded", or expert_alignment.
            stream: where to queue it; as for `Communicator.all_reduce`.

        Returns:
            The rows, [R, hidden]: one for each slot of this rank's experts, ordered by expert, then the source's rank,
            then token, then k, unless full_scatter_indices give another order; their weights, [R], or None; and the
            descriptor. With dispatch_dtype the rows are a pair, [R, hidden] of float8 and [R, hidden / 128] of float32.
            With max_recv_tokens the arrays have that many rows; the first `desc.num_recv_tokens` are filled.

            With layout="rank" there is one row for each token that has an expert on this rank, ordered by the source's
            rank, then token. Their weights are [R, topk], zero where `desc.local_expert_ids` is -1. With
            layout="padded" R stands for [experts of this rank, world_size * max_tokens] in all shapes; of each expert
            the first `desc.expert_rows` rows are filled, ordered by the source's rank, then token.

        Raises:
            ArgumentError: an argument is wrong on this rank, and nothing was done; or an expert id is out of range on
                any rank, which all ranks raise, and the layer stays usable.
            CapacityError: more rows came to a rank than max_recv_tokens, or with layout="padded" to an expert than it
                has room for; see `check`. With `grows` also: a rank has more than max_tokens tokens.
            MismatchError: another rank makes another call.
            CommunicatorError: a peer failed; see its subclasses.
        """
        autograd = self._recording_dispatch(input, weight)
        if autograd is not None:
            # What torch keeps for the backward pass must not be written over.
            kept = self._keeps_outputs
            call = lambda: self._dispatch(input, exp_indices, weight, full_scatter_indices, stream, buffered=kept)  # noqa: E731
            return autograd.dispatch(self, call, input, weight)
        return self._dispatch(input, exp_indices, weight, full_scatter_indices, stream, buffered=True)

    def _dispatch(
        self,
        input: Any,
        exp_indices: Any,
        weight: Any,
        full_scatter_indices: Any,
        stream: StreamLike,
        *,
        buffered: bool,
    ) -> tuple[Any, Any, EPAllToAllLayoutDesc]:
        given = stream
        inputs, stream = self._dispatch_arguments(
            input, exp_indices, weight, full_scatter_indices, stream, buffered=buffered
        )
        if self.max_recv_tokens is None:
            self._refuse_capture(stream)
        taken, outputs = NO_BUFFER, self.ctx.workspace.outputs
        if buffered and outputs is not None:
            # In the exact mode a capture was refused above.
            on_current = given is None and (self.max_recv_tokens is None or self._outlives_no_graph(stream))
            taken = outputs.take(inputs.tokens.owner, on_current_stream=on_current)
        desc = self.ctx.describe("dispatch", inputs, taken)
        output = self._fixed_output(desc, inputs, taken)
        pending = PendingDispatch(desc, inputs, stream, output, taken=taken)
        if pending.output is not None:
            return self._receive_fixed(ROUTE | SEND | GATHER | RECEIVE, pending, pending.output, stream)
        self.ctx.begin(ROUTE | GATHER, pending.desc, inputs, stream)
        return self._receive_exact(SEND | RECEIVE, pending, stream)

    def dispatch_send(
        self,
        input: Any,
        exp_indices: Any,
        weight: Any = None,
        full_scatter_indices: Any = None,
        *,
        stream: StreamLike = None,
    ) -> PendingDispatch:
        """The first half of `dispatch`: queues the sends and does not wait.

        The arguments must stay as they are until `dispatch_recv`. One dispatch can be under way at a time.
        """
        recorded = (input, weight) if self._recording_dispatch(input, weight) is not None else None
        inputs, stream = self._dispatch_arguments(input, exp_indices, weight, full_scatter_indices, stream)
        desc = self.ctx.describe("dispatch_send", inputs)
        pending = PendingDispatch(desc, inputs, stream, self._fixed_output(desc, inputs), recorded)
        self.ctx.begin(ROUTE | SEND, desc, inputs, stream)
        self._sent = pending
        return pending

    def dispatch_recv(
        self, pending: PendingDispatch, *, stream: StreamLike = None
    ) -> tuple[Any, Any, EPAllToAllLayoutDesc]:
        """The second half of `dispatch`: receives the rows. Returns and raises as `dispatch`."""
        self.ctx.require_usable()
        if pending is not self._sent or pending is None:
            raise ArgumentError("pending", "is not the dispatch of this layer that is under way")
        given = pending.recorded or ()
        autograd = recorder_of(*given)
        if autograd is not None:
            call = lambda: self.dispatch_recv(pending, stream=stream)  # noqa: E731
            return autograd.dispatch(self, call, *given)
        stream = pending.stream if stream is None else stream
        if pending.output is not None:
            self._sent = None
            return self._receive_fixed(GATHER | RECEIVE, pending, pending.output, stream)
        self._refuse_capture(stream)
        self._sent = None
        self.ctx.begin(GATHER, pending.desc, pending.inputs, stream)
        return self._receive_exact(RECEIVE, pending, stream)

    def redispatch(self, input: Any, ep_a2a_layout_desc: EPAllToAllLayoutDesc, *, stream: StreamLike = None) -> Any:
        """Sends other values of the same tokens with the routing of an earlier dispatch. Nothing is counted again.

        It is the adjoint of `combine`.

        Args:
            input: [T, hidden] of `dtype`; or with dispatch_dtype a pair, as for `dispatch`.
            ep_a2a_layout_desc: of a dispatch of this layer.
            stream: as for `dispatch`.

        Returns:
            The rows, as that dispatch ordered them; of a pair, a pair.
        """
        desc = self._own_desc(ep_a2a_layout_desc)
        self._refuse_under_way()
        autograd = self._recording_dispatch(input)
        if autograd is not None:
            return autograd.redispatch(self, lambda: self.redispatch(input, desc, stream=stream), input, desc)
        rows, scales = self._rows_of(input, desc.num_dispatch_token_cur_rank)
        stream = self.ctx.stream_for(stream, rows.owner)
        output = self._new_rows(rows.owner, desc.rows, float8=scales is not None)
        if scales is None:
            self.ctx.repeat(desc, rows, self._view(output), stream)
        else:
            packed = self.ctx.pack(rows, scales, stream)
            self.ctx.repeat(desc, packed, self._view(output[0]), stream, self._view(output[1]))
        return output

    def _receive_exact(
        self, phases: int, pending: PendingDispatch, stream: StreamLike
    ) -> tuple[Any, Any, EPAllToAllLayoutDesc]:
        desc, made, taken = pending.desc, None, pending.taken
        if self.layout == "rank" and taken.whole is not None:  # what can be done while the counts are on their way
            desc.reserve_rows(self._most_rows)
            made = self._new_output(pending.inputs, self._most_rows, taken)
        rows = self.ctx.await_rows(desc)
        if self.layout == "rank" or self.ctx.layout.expert_alignment:
            desc.chosen_rows = self.ctx.workspace.chosen_rows
        bad: ProxyCCLError | None = self.ctx.bad_expert("exp_indices", self._num_tot_experts)
        wanted = self.ctx.wanted_tokens
        if wanted:
            most = self.ep_config.max_tokens
            bad = CapacityError(f"a rank dispatches {wanted} tokens; max_tokens is {most}", wanted)
        if bad is not None:
            end = RECEIVE if phases == RECEIVE else LAYOUT  # rows that were sent must still be received
            self.ctx.receive(end, desc, pending.inputs, 0, None, None, stream)
            raise bad
        output = self._new_output(pending.inputs, rows, taken) if made is None else made.first(rows)
        self.ctx.receive(phases, desc, pending.inputs, rows, output.views, None, stream)
        return self._received(output, desc, stream)

    def _receive_fixed(
        self, phases: int, pending: PendingDispatch, output: _Output, stream: StreamLike
    ) -> tuple[Any, Any, EPAllToAllLayoutDesc]:
        assert self.max_recv_tokens is not None
        desc = pending.desc
        received = self._view(desc.num_recv_tokens)
        self.ctx.receive(phases, desc, pending.inputs, self.max_recv_tokens, output.views, received, stream)
        return self._received(output, desc, stream)

    def _received(
        self, output: _Output, desc: EPAllToAllLayoutDesc, stream: StreamLike
    ) -> tuple[Any, Any, EPAllToAllLayoutDesc]:
        if output.copies:
            self.ctx.copy(output.copies, stream, (output.rows,))
        self._check_if_done(stream)
        return output.rows, output.weights, desc

    def _fixed_output(
        self, desc: EPAllToAllLayoutDesc, inputs: DispatchInputs, taken: TakenBuffer = NO_BUFFER
    ) -> _Output | None:
        """With a fixed number of rows, what a dispatch will fill. Sizes the descriptor's tables for it."""
        if self.max_recv_tokens is None:
            return None
        desc.num_recv_tokens = self.ctx.arrays.new(inputs.tokens.owner, (1,), "int32")
        desc.size_rows(self.max_recv_tokens)
        return self._new_output(inputs, self.max_recv_tokens, taken)

    def _new_output(self, inputs: DispatchInputs, rows: int, taken: TakenBuffer) -> _Output:
        config, like, new = self.ep_config, inputs.tokens.owner, self.ctx.arrays.new
        leading = self._leading(rows)
        shape = (*leading, config.topk) if self.layout == "rank" else leading
        weights = None if inputs.weights is None else new(like, shape, config.weight)
        output = self._new_rows(like, rows, float8=self.quantized, taken=taken)
        made = output if self.quantized else (output, None)
        views = [None if array is None else self._view(array) for array in (made[0], weights, made[1])]
        copies = []
        if taken.passed and self.ctx.workspace.outputs is not None:
            outputs = self.ctx.workspace.outputs
            for place, address in ((0, outputs.address(taken.number)), (2, outputs.scales_address(taken.number))):
                view = views[place]
                if view is not None:
                    copies.append((view.ptr, address, view.nbytes))
                    views[place] = replace(view, ptr=address)
        return _Output(output, weights, tuple(views), tuple(copies))

    def _new_rows(self, like: Any, rows: int, *, float8: bool, taken: TakenBuffer = NO_BUFFER) -> Any:
        """New rows, or those of an output buffer; in float8 a pair of them and their scales."""
        config, leading, outputs = self.ep_config, self._leading(rows), self.ctx.workspace.outputs
        new: Callable[..., Any] = functools.partial(self.ctx.arrays.new, like)
        new_scales = functools.partial(new, dtype="float32")
        if taken.whole is not None and outputs is not None:
            new, new_scales = functools.partial(outputs.rows, taken), functools.partial(outputs.scales, taken)
        if not float8:
            return new((*leading, config.hidden), config.token)
        scales = new_scales((*leading, config.hidden // self._scale_elements))
        return new((*leading, config.hidden), _FLOAT8), scales

    def _leading(self, rows: int) -> tuple[int, ...]:
        """The shape of that many rows without their elements."""
        return (rows,) if self._rows_shape is None else self._rows_shape

    # -- combine ---

    def combine(
        self,
        input: Any,
        ep_a2a_layout_desc: EPAllToAllLayoutDesc,
        *,
        weights: Any = None,
        topk_weights: Any = None,
        out: Any = None,
        stream: StreamLike = None,
    ) -> Any:
        """Sends the experts' rows back, and sums the rows of each token.

        On one node the sum is made in the order of k, in float32 (float64 for float64), and rounded once. With
        enable_local_combine each rank's partial sum is rounded, and these are summed in the order of ranks. Across
        nodes the same holds for each node's partial sum.

        Args:
            input: [R, hidden] of `dtype`, in the order of the dispatch's output.
            ep_a2a_layout_desc: of that dispatch.
            weights: float32 [R]: the factor of each row in the sum, such as the weights that the dispatch returned;
                None for 1. All ranks give it, or none.
            topk_weights: float32 [T, topk]: the same by the slots of this rank's own tokens, for the rank that sums
                knows them. Only where all ranks reach each other's memory, and without enable_local_combine.
            out: [T, hidden], or None for a new array.
            stream: as for `dispatch`.

        Returns:
            `out`, or the new array. Raises as `dispatch`.
        """
        autograd = self._recording_combine(input, weights, topk_weights)
        if autograd is not None:
            _refuse_recorded_output(out)
            desc = self._own_desc(ep_a2a_layout_desc)
            call = lambda: self.combine(input, desc, weights=weights, stream=stream)  # noqa: E731
            return autograd.combine(self, call, input, weights, desc)
        desc, rows, scales, stream = self._combine_arguments(input, ep_a2a_layout_desc, weights, stream)
        slots = self._slot_weights(topk_weights, desc)
        output, target = self._combine_output(out, rows, desc)
        self.ctx.combine("combine", SEND | RECEIVE, desc, rows, scales, target, stream, slots)
        return output

    def combine_input(self, ep_a2a_layout_desc: EPAllToAllLayoutDesc) -> Any:
        """With output_buffers: an array for the experts' results, [R, hidden] of `dtype`, whose rows `combine` need not
        send. It is the same memory for every dispatch, and free again behind `combine`. With keeps_outputs it stays,
        and is a new array where no buffer is free.

        Args:
            ep_a2a_layout_desc: of the dispatch.
        """
        desc = self._own_desc(ep_a2a_layout_desc)
        taken, outputs = NO_BUFFER, self.ctx.workspace.outputs
        if outputs is not None:
            on_current = self._outlives_no_graph(self.ctx.stream_for(None, desc.counts))
            taken = outputs.take_for_combine(desc.counts, on_current_stream=on_current)
        return self._new_rows(desc.counts, desc.rows, float8=False, taken=taken)

    def combine_send(
        self,
        input: Any,
        ep_a2a_layout_desc: EPAllToAllLayoutDesc,
        *,
        weights: Any = None,
        topk_weights: Any = None,
        stream: StreamLike = None,
    ) -> PendingCombine:
        """The first half of `combine`: queues the sends and does not wait.

        `input` and the weights must stay as they are until `combine_recv`. One combine can be under way at a time.
        """
        desc, rows, scales, stream = self._combine_arguments(input, ep_a2a_layout_desc, weights, stream)
        slots = self._slot_weights(topk_weights, desc)
        recorded = (input, weights) if self._recording_combine(input, weights, topk_weights) is not None else None
        self.ctx.combine("combine_send", SEND, desc, rows, scales, None, stream)
        self._returned = PendingCombine(desc, rows, scales, stream, slots, recorded)
        return self._returned

    def combine_recv(self, pending: PendingCombine, *, out: Any = None, stream: StreamLike = None) -> Any:
        """The second half of `combine`: sums the received rows. Returns and raises as `combine`."""
        self.ctx.require_usable()
        if pending is not self._returned or pending is None:
            raise ArgumentError("pending", "is not the combine of this layer that is under way")
        given = pending.recorded or ()
        autograd = recorder_of(*given)
        if autograd is not None:
            _refuse_recorded_output(out)
            call = lambda: self.combine_recv(pending, stream=stream)  # noqa: E731
            return autograd.combine(self, call, *given, pending.desc)
        output, target = self._combine_output(out, pending.rows, pending.desc)
        self._returned = None
        stream = pending.stream if stream is None else stream
        self.ctx.combine(
            "combine_recv", RECEIVE, pending.desc, pending.rows, pending.weights, target, stream, pending.topk_weights
        )
        return output

    def combine_weights(
        self, input: Any, ep_a2a_layout_desc: EPAllToAllLayoutDesc, *, stream: StreamLike = None
    ) -> Any:
        """Brings each slot's number back from the rank of the slot's expert.

        Args:
            input: float32 [R], each row's number. With layout="rank" [R, topk], zero where `local_expert_ids` is -1.
                The weights that the dispatch returned come back as they were given, but for dropped slots.
            ep_a2a_layout_desc: of the dispatch.
            stream: as for `dispatch`.

        Returns:
            float32 [T, topk], zero for dropped slots. Raises as `dispatch`.
        """
        if self.ep_config.weight.name != "float32":
            raise ArgumentError("combine_weights", f"needs weight_dtype float32, not {self.ep_config.weight}")
        desc = self._own_desc(ep_a2a_layout_desc)
        if self._returned is not None:
            raise ArgumentError("combine_weights", "a combine is under way; call combine_recv first")
        by_rank = self.layout == "rank"
        shape = (desc.rows, self.ep_config.topk) if by_rank else self._leading(desc.rows)
        values = self._input(input, "input", shape, "float32")
        collect = self.ctx.collect_choices if by_rank else self.ctx.collect
        return collect(desc, values, self.ctx.stream_for(stream, input))

    def weights_by_row(self, topk_weights: Any, ep_a2a_layout_desc: EPAllToAllLayoutDesc) -> Any:
        """Sends the weights of this rank's slots to their rows, for a later `combine`. For torch tensors.

        Args:
            topk_weights: float32 [T, topk].
            ep_a2a_layout_desc: of the dispatch.

        Returns:
            float32 [R]: each row's weight. With layout="rank" [R, topk], zero where `local_expert_ids` is -1. Raises as
            `dispatch`.
        """
        desc = self._own_desc(ep_a2a_layout_desc)
        self._refuse_under_way()
        shape = (desc.num_dispatch_token_cur_rank, self.ep_config.topk)
        weights = self._input(topk_weights, "topk_weights", shape, "float32")
        # Every row gets all weights of its token, of which its slot's is one.
        spread = self.ctx.arrays.new(weights.owner, (*self._leading(desc.rows), shape[1]), "float32")
        self.ctx.repeat(desc, weights, self._view(spread), self.ctx.stream_for(None, weights.owner))
        if self.layout == "rank":
            return spread.masked_fill_(desc.local_expert_ids < 0, 0)
        slots = desc.row_slots.clamp(0, shape[1] - 1).long().view(*self._leading(desc.rows), 1)
        return spread.gather(-1, slots).squeeze(-1)

    # -- checking ---

    def check(self) -> None:
        """Raises the errors of the dispatches that have ended since the last check: the same on all ranks that have
        waited for them.

        With max_recv_tokens nothing else raises these errors, as dispatch does not wait.

        Raises:
            CapacityError: more rows came to a rank than max_recv_tokens, or with layout="padded" to an expert than it
                has room for, as tokens chose it twice. Those that did not fit were left out, and count as zero in
                `combine`. `needed` is the most rows of a rank, or of an expert.
            ArgumentError: an expert id was out of range, or full_scatter_indices no permutation, or for fewer tokens
                than the ranks have. Bad ids were dropped.
        """
        self.ctx.require_usable()
        most, bad = self.ctx.most_rows(), self.ctx.bad_expert("exp_indices", self._num_tot_experts)
        if self.ctx.bad_indices():
            raise ArgumentError(
                "full_scatter_indices", "must be a permutation of this rank's rows, for the tokens of all ranks"
            )
        if self.max_recv_tokens is None:
            return
        if bad is not None:
            raise bad
        if self._padded_rows and most > self._padded_rows:
            raise CapacityError(
                f"an expert received {most} rows, as tokens chose it more than once; those beyond its room of "
                f"{self._padded_rows} rows were left out",
                most,
            )
        if not self._padded_rows and most > self.max_recv_tokens:
            raise CapacityError(
                f"a rank received {most} rows; those beyond max_recv_tokens, {self.max_recv_tokens}, were left out",
                most,
            )

    def _check_if_done(self, stream: StreamLike) -> None:
        if stream is None and self.ctx.runtime_name == "host":  # the call has waited for its end
            self.check()

    def _dispatch_arguments(
        self,
        input: Any,
        exp_indices: Any,
        weight: Any,
        full_scatter_indices: Any,
        stream: StreamLike,
        *,
        buffered: bool = False,
    ) -> tuple[DispatchInputs, StreamLike]:
        self._refuse_under_way()
        config, wanted = self.ep_config, 0
        rows, scales = self._rows_of(input, -1)
        count = rows.shape[0]
        if count > config.max_tokens and not self._grows:
            raise ArgumentError("input", f"has {count} tokens; expected at most max_tokens, {config.max_tokens}")
        if self.quantized and scales is None and self._scale_elements != SCALED_ELEMENTS:
            raise ArgumentError("input", f"must be a pair with scale_elements={self._scale_elements}")
        if self._takes_wide_ids:
            ids = index_array(self.ctx.group, exp_indices, "exp_indices", (count, config.topk))
        else:
            ids = self._input(exp_indices, "exp_indices", (count, config.topk), "int32")
        weights = scatter = None
        if weight is not None:
            weights = self._input(weight, "weight", (count, config.topk), config.weight.name)
        if full_scatter_indices is not None:
            if self.layout != "expert":
                raise ArgumentError("full_scatter_indices", f'can\'t be given with layout="{self.layout}"')
            if self.ctx.layout.expert_alignment:
                raise ArgumentError("full_scatter_indices", "can't be given with expert_alignment")
            scatter = self._input(full_scatter_indices, "full_scatter_indices", (-1, config.topk), "int32")
        if count > config.max_tokens:  # nothing is sent but the number, so that all ranks raise the same
            wanted = count
            rows, ids = _none_of(rows), _none_of(ids)
            scales, weights = scales and _none_of(scales), weights and _none_of(weights)
        stream = self.ctx.stream_for(stream, rows.owner)
        tokens = rows
        if scales is not None:
            tokens = self.ctx.pack(rows, scales, stream)
        elif self.quantized and not (buffered and self.ctx.scales_while_storing):
            tokens = self.ctx.quantize(rows, stream)
        lost = None
        if self._surviving is not None:
            ids, lost = self._surviving.renumber(ids, stream)
        return DispatchInputs(tokens, ids, weights, scatter, lost, wanted), stream

    def _rows_of(self, input: Any, count: int) -> tuple[ArrayView, ArrayView | None]:
        """Views of the caller's rows and, of a pair, of their scales."""
        config = self.ep_config
        if not isinstance(input, tuple):
            return self._input(input, "input", (count, config.hidden), config.token.name), None
        if not self.quantized or len(input) != 2:
            raise ArgumentError("input", "a pair of rows and scales needs a layer with dispatch_dtype")
        rows = self._input(input[0], "input", (count, config.hidden), _FLOAT8)
        scales = self._input(input[1], "input", (rows.shape[0], config.hidden // self._scale_elements), "float32")
        return rows, scales

    def _combine_arguments(
        self, input: Any, desc: EPAllToAllLayoutDesc, weights: Any, stream: StreamLike
    ) -> tuple[EPAllToAllLayoutDesc, ArrayView, ArrayView | None, StreamLike]:
        desc = self._own_desc(desc)
        if self._returned is not None:
            raise ArgumentError("combine", "another combine is under way; call combine_recv first")
        config = self.ep_config
        leading = self._leading(desc.rows)
        rows = self._input(input, "input", (*leading, config.hidden), config.token.name)
        scales = None if weights is None else self._input(weights, "weights", leading, "float32")
        return desc, rows, scales, self.ctx.stream_for(stream, input)

    def _recording_dispatch(self, *inputs: Any) -> Recorder | None:
        autograd = None if self.quantized else recorder_of(*inputs)
        if autograd is not None and self.layout == "padded":
            raise ArgumentError("input", 'requires a gradient, which is not recorded with layout="padded"')
        return autograd

    def _recording_combine(self, input: Any, weights: Any, topk_weights: Any) -> Recorder | None:
        autograd = recorder_of(input, weights, topk_weights)
        if autograd is not None and (topk_weights is not None or self.layout == "padded"):
            argument = "input" if topk_weights is None else "topk_weights"
            raise ArgumentError(argument, "can't be given if torch records the call for a backward pass")
        return autograd

    def _slot_weights(self, topk_weights: Any, desc: EPAllToAllLayoutDesc) -> ArrayView | None:
        if topk_weights is None:
            return None
        if not self.sums_on_own_node:
            raise ArgumentError("topk_weights", "needs one node whose ranks reach each other, and no local combine")
        return self._input(
            topk_weights, "topk_weights", (desc.num_dispatch_token_cur_rank, self.ep_config.topk), "float32"
        )

    @property
    def sums_on_own_node(self) -> bool:
        """Whether a token's rows are all summed by its own rank, so that `combine` takes topk_weights."""
        experts = self.ctx.workspace.experts
        return experts.nodes == 1 and not experts.local_combine

    def _combine_output(self, out: Any, rows: ArrayView, desc: EPAllToAllLayoutDesc) -> tuple[Any, ArrayView]:
        shape = (desc.num_dispatch_token_cur_rank, self.ep_config.hidden)
        return output_array(self.ctx.group, out, rows, shape, self.ep_config.token)

    def _own_desc(self, desc: EPAllToAllLayoutDesc) -> EPAllToAllLayoutDesc:
        self.ctx.require_usable()
        if not isinstance(desc, EPAllToAllLayoutDesc):
            raise ArgumentError(
                "ep_a2a_layout_desc", f"must be the descriptor that a dispatch gave, not {type(desc).__name__}"
            )
        desc.require_received(self.ctx, "ep_a2a_layout_desc")
        return desc

    def _refuse_under_way(self) -> None:
        self.ctx.require_usable()
        if self._sent is not None:
            raise ArgumentError("dispatch", "another dispatch is under way; call dispatch_recv first")

    def _is_capturing(self, stream: StreamLike) -> bool:
        runtime = self.ctx.group.runtime
        return runtime.name != "host" and runtime.is_capturing(runtime.stream_handle(stream))

    def _outlives_no_graph(self, stream: StreamLike) -> bool:
        """Whether what a call makes on a stream is needed no longer than its arrays: a graph needs it longer."""
        return not self._keeps_outputs or not self._is_capturing(stream)

    def _refuse_capture(self, stream: StreamLike) -> None:
        if self._is_capturing(stream):
            raise ArgumentError(
                "max_recv_tokens",
                "is needed to capture a dispatch in a graph, which can't wait for its size",
            )

    def _view(self, array: Any) -> ArrayView:
        return input_view(self.ctx.group, array, "out")

    def _input(self, x: Any, argument: str, shape: tuple[int, ...], dtype: str) -> ArrayView:
        return input_array(self.ctx.group, x, argument, shape, dtype)


def _none_of(view: ArrayView) -> ArrayView:
    """The same array without any row."""
    return replace(view, shape=(0, *view.shape[1:]))


def _refuse_recorded_output(out: Any) -> None:
    if out is not None:
        raise ArgumentError("out", "can't be given if torch records the call for a backward pass")
