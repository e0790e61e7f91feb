"""Launches dispatch and combine, fills in their arguments, and reads a dispatch's number of rows on the CPU."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from proxyccl.channels.arguments import input_view
from proxyccl.channels.communicator import Communicator
from proxyccl.channels.expert_parallel.arrays import ExpertArrays
from proxyccl.channels.expert_parallel.calls import FINALIZE, call_name
from proxyccl.channels.expert_parallel.config import (
    MAX_SLOTS,
    MOST_ADDED,
    NUMBER_DROPS,
    SCALED_DTYPES,
    EPConfig,
    column_of,
)
from proxyccl.channels.expert_parallel.geometry import (
    BY_EXPERT,
    DISPATCH_KERNELS,
    STORE_KERNELS,
    OutputLayout,
    WorkspaceShape,
    blocks_for,
    dispatch_file,
)
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.members import Members
from proxyccl.channels.expert_parallel.nodes import Nodes
from proxyccl.channels.expert_parallel.numbers import whole_number
from proxyccl.channels.expert_parallel.output_buffers import NO_BUFFER, TakenBuffer
from proxyccl.channels.expert_parallel.tables import RECEIVED, TableLayouts
from proxyccl.channels.expert_parallel.workspace import ExpertWorkspace
from proxyccl.channels.launches import CurrentStream
from proxyccl.channels.memory import allocate
from proxyccl.channels.segment.calls import CollectiveCall
from proxyccl.device._native import ffi, lib
from proxyccl.device.arrays.array import Array, ArrayView
from proxyccl.device.errors import ArgumentError, ClosedError, WaitTimeoutError
from proxyccl.device.kernel import Launch
from proxyccl.device.runtime import StreamLike
from proxyccl.device.sleepers import ProxiedStruct

ROUTE: int = lib.PROXYCCL_EXPERT_ROUTE
GATHER: int = lib.PROXYCCL_EXPERT_GATHER
SEND: int = lib.PROXYCCL_EXPERT_SEND
RECEIVE: int = lib.PROXYCCL_EXPERT_RECEIVE
LAYOUT: int = lib.PROXYCCL_EXPERT_LAYOUT
TELL: int = lib.PROXYCCL_EXPERT_TELL

_SPINS = 2000  # polls of the count between two looks at the group; on a GPU a count takes about 20 us
_HOST_THREADS = 16
_WIDE_ID_BYTES = 8
NO_TABLES = bytes(ffi.sizeof("ProxycclExpertLayout"))


def logged_number(number: int) -> int:
    """The number of a dispatch as the call log has it."""
    return number % 2**31


@dataclass(frozen=True)
class DispatchInputs:
    """The arrays that a dispatch reads until its end.

    Attributes:
        tokens: [T, elements of a row].
        expert_ids: int32 or int64 [T, topk].
        weights: [T, topk], or None.
        scatter: int32 [tokens of all ranks, topk], or None: the caller's own rows.
        lost_slots: bool [T, topk]: the slots whose experts' ranks are lost; None if the layer knows of no lost ranks.
        wanted_tokens: the number of tokens that this rank would have sent if the layer were large enough, or 0 if it
        is.
    """

    tokens: ArrayView
    expert_ids: ArrayView
    weights: ArrayView | None = None
    scatter: ArrayView | None = None
    lost_slots: ArrayView | None = None
    wanted_tokens: int = 0


class DispatchCombineContext:
    """The buffers of an expert-parallel layer, and the launches of its dispatch and combine.

    All ranks make it together, with `create`, and make the same calls in the same order. `EPAll2AllLayer` and
    `DispatchCombine` are built on it. Use it directly to schedule phases by hand.

    Attributes:
        ep_config: sizes and types.
        members: the ranks.
        group: the same ranks, for the library's own modules.
        arrays: makes the arrays of results.
        nodes: the placement of the ranks on nodes.
        workspace: memory that peers reach.
        layout: of the outputs.
        tables: of its descriptors.
        grid: blocks of the kernels and their threads.
        dispatch_plain, dispatch_stored: launches to `copy`: the dispatch, and the one of whole dispatches to output
            buffers.
        dispatch_scaled, quantize_launch: the same for the dispatch that makes float8 rows where it stores them, and the
            kernel that makes them before; None if the layer needs none.
        scale_bytes: bytes of a row's scales in float8.
        scales_by_columns: as for `EPAll2AllLayer`.
        numbers: numbers the dispatches.
    """

    def __init__(
        self,
        members: Members,
        config: EPConfig,
        number: int,
        *,
        capacity: int = 2,
        num_sm: int = 20,
        local_combine: bool = False,
        proxied: bool = False,
        use_aot: bool = False,
        scales: int = 0,
        quantizes: bool = False,
        scales_by_columns: bool = False,
        layout: OutputLayout = BY_EXPERT,
        dropping_ids: int = NUMBER_DROPS,
    ) -> None:
        capacity = whole_number("capacity", capacity, 1, MAX_SLOTS // (config.max_tokens * config.topk))
        config.require_room(capacity * config.max_tokens * config.topk, "capacity")
        num_sm = whole_number("num_sm", num_sm, 1)
        self._number = number
        self.members = members
        self.group = group = members.group
        runtime = group.runtime
        # Some steps take a thread for each rank of a node, or for each node.
        threads = max(_HOST_THREADS, config.world_size) if runtime.name == "host" else lib.PROXYCCL_EXPERT_THREADS
        self.blocks = min(runtime.launch_defaults.blocks, blocks_for(config.max_tokens, num_sm))
        self.ep_config = config
        self.arrays = ExpertArrays(group)
        self.runtime_name = runtime.name
        shipped = functools.partial(runtime.shipped, compiled_only=use_aot)
        if use_aot:  # load now what is used later, or by some layers
            for name in (*DISPATCH_KERNELS.values(), *STORE_KERNELS.values()):
                shipped(dispatch_file(name), name)
            shipped("experts/spread.h", "expert_spread")
            shipped("moves.h", "barrier")
        weigh = shipped("experts/weigh.h", "expert_weigh", config.token.name)
        combines = {
            name: shipped("experts/combine.h", "combine", name) for name in {config.token.name, config.weight.name}
        }
        quantize = shipped("experts/quantize.h", "expert_quantize", config.token.name) if quantizes else None
        self._pack = shipped("experts/quantize.h", "expert_pack") if scales else None
        self.scale_bytes = 4 * scales
        self.scales_by_columns = scales_by_columns
        self.nodes = Nodes.of_group(group, config, proxied=proxied)
        shape = WorkspaceShape(config, self.blocks, threads, layout, local_combine, self.scale_bytes)
        with group.exchange.telling():
            self.workspace = ExpertWorkspace(group, self.nodes, shape)
        self.workspace.experts.dropping_ids = dropping_ids
        self.layout = layout
        self.tables = TableLayouts(config, self.nodes, layout)
        group.keep(self.workspace)  # a rank may finish a call and drop its layer before its peers have finished
        self._capacity = capacity * config.max_tokens * config.topk
        self._output_buf: tuple[Array, Array] | None = None
        self._dispatch_call = ffi.new("ProxycclDispatch *")
        self._combine_call = ffi.new("ProxycclCombine *")
        experts = ProxiedStruct.of(bytes(ffi.buffer(self.workspace.experts)), self.workspace.sleepers)
        self.grid = (self.blocks, threads)
        name = DISPATCH_KERNELS[self.workspace.announces]
        dispatch = shipped(dispatch_file(name), name)
        empty = bytes(ffi.buffer(self._dispatch_call))
        self.dispatch_plain = dispatch.prepare(*self.grid, experts, empty)
        self.dispatch_stored = self.dispatch_plain
        if self.workspace.outputs is not None and (store := STORE_KERNELS.get(self.workspace.announces)):
            self.dispatch_stored = shipped(dispatch_file(store), store).prepare(*self.grid, experts, empty)
        self.dispatch_scaled: Launch | None = None
        if quantizes and self.workspace.outputs is not None and config.token.name in SCALED_DTYPES:
            scaled = shipped("experts/dispatch.h", f"{name}_scaled", config.token.name)
            self.dispatch_scaled = scaled.prepare(*self.grid, experts, empty)
        filled = bytes(ffi.buffer(self._combine_call))
        self._combine = {name: kernel.prepare(*self.grid, experts, filled) for name, kernel in combines.items()}
        # Peers do not wait for it, so it takes the whole device.
        self._weighing = ffi.new("ProxycclWeighing *")
        nothing = bytes(ffi.buffer(self._weighing))
        self._weigh = weigh.prepare(runtime.launch_defaults.blocks, threads, experts, nothing)
        self.quantize_launch = quantize.prepare(*self.grid, experts, filled) if quantize is not None else None
        self.numbers = itertools.count(1)
        self.closed = False

    @classmethod
    def create(cls, ep_config: EPConfig, capacity: int = 2, *, ep_group: Any = None) -> DispatchCombineContext:
        """Makes the buffers; all ranks call it together.

        Args:
            ep_config: the same on all ranks except `rank`.
            capacity: rows of `dispatch_output_buf`, as a multiple of max_tokens * topk.
            ep_group: a `Communicator`, an MPI communicator or a torch process group; None for MPI's world.

        Raises:
            ArgumentError: an argument is wrong, or differs between ranks.
            ResourceError: no memory or channel ids are left.
        """
        members = Members.of(ep_group, ep_config)
        with members.closed_on_error():
            number = members.agree_on(ep_config.compared(), f"a context ({ep_config.describe()})")
            return cls(members, ep_config, number, capacity=capacity)

    @property
    def communicator(self) -> Communicator:
        """The ranks."""
        return self.members.communicator

    @property
    def owns_communicator(self) -> bool:
        """Whether `finalize` closes the communicator."""
        return self.members.owned

    def finalize(self) -> None:
        """Releases the buffers. All ranks call it together; calling it twice does nothing."""
        if self.closed:
            return
        self.closed = True
        group = self.group
        if group.failure.usable:
            group.launches.agree(CollectiveCall(FINALIZE))
            group.synchronize()
            group.links.drain()
            group.exchange.barrier("finalize")  # no rank frees memory that a peer may still write to
            group.let_go(self.workspace)
            self.workspace.close()
        self.members.close()

    def require_usable(self) -> None:
        """Raises ClosedError after `finalize`, or the error that ended the communicator."""
        if self.closed:
            raise ClosedError("the expert-parallel layer was finalized")
        self.group.failure.require_usable()

    # -- the output buffer ---

    @property
    def dispatch_output_buf(self) -> Array:
        """[rows, hidden]: a buffer for received rows, for callers that reuse one."""
        return self.reallocate_dispatch_output_buf(0)[0]

    def reallocate_dispatch_output_buf(self, dispatch_recv_tokens: int) -> tuple[Array, Array]:
        """Makes the output buffer larger if it has fewer rows. Not collective, as peers don't access it.

        Args:
            dispatch_recv_tokens: rows that are needed.

        Returns:
            The buffer, [rows, hidden] of the token type, and one for the rows' weights, [rows].
        """
        self.require_usable()
        dispatch_recv_tokens = whole_number("dispatch_recv_tokens", dispatch_recv_tokens, 0, MAX_SLOTS)
        self.ep_config.require_room(dispatch_recv_tokens, "dispatch_recv_tokens")
        if self._output_buf is None or self._output_buf[0].shape[0] < dispatch_recv_tokens:
            rows = self._capacity = max(self._capacity, dispatch_recv_tokens)
            config = self.ep_config
            self._output_buf = (
                allocate(self.group, (rows, config.hidden), config.token),
                allocate(self.group, (rows,), config.weight),
            )
        return self._output_buf

    # -- dispatch ---

    def describe(
        self,
        call: str,
        inputs: DispatchInputs,
        taken: TakenBuffer = NO_BUFFER,
        *,
        most_rows: int | None = None,
        counts_rows: bool = False,
        most_tokens: int = 0,
    ) -> EPAllToAllLayoutDesc:
        """The descriptor of a new dispatch. Refuses the call if the ranks' arguments differ.

        Args:
            call: its name.
            inputs: the arrays that it reads.
            taken: the output buffer to which its rows go. Then one kernel must send and receive.
            most_rows: rows that its tables have room for; None to size them when the number is known.
            counts_rows: whether kernels count the received rows for `num_recv_tokens`.
            most_tokens: as for `logged`.
        """
        number = self.next_number()
        name = call_name(call, weights=inputs.weights is not None, indices=inputs.scatter is not None)
        self._agree(name, self.ep_config.token.name, number, most_tokens)
        tokens = inputs.tokens
        return EPAllToAllLayoutDesc(
            self,
            number,
            tokens.shape[0],
            tokens.owner,
            most_rows=most_rows,
            counts_rows=counts_rows,
            scatter=inputs.scatter,
            lost_slots=inputs.lost_slots,
            output_buffer=taken.number,
            wide_ids=inputs.expert_ids.dtype.itemsize == _WIDE_ID_BYTES,
        )

    def next_number(self) -> int:
        """The number of a new dispatch."""
        return next(self.numbers)

    def begin(self, phases: int, desc: EPAllToAllLayoutDesc, inputs: DispatchInputs, stream: StreamLike) -> None:
        """Queues the start of a dispatch: its counts, and its rows if `phases` has SEND."""
        desc.require_sent(self, "desc")
        call = self._fill_inputs(phases, desc, inputs)
        desc.stream = stream
        self._launch(self.dispatch_plain, call, stream, desc, (inputs,))

    def await_rows(self, desc: EPAllToAllLayoutDesc) -> int:
        """Waits on the CPU until this dispatch's number of rows is known, but not for the stream. Returns the number.

        Raises:
            CommunicatorError: a peer failed.
        """
        received, ticket, group = self.workspace.received_rows, desc.number, self.group
        deadline = time.monotonic() + 2 * group.timeout
        # A sleep takes longer than most waits for a GPU. The host runtime's threads need this one's core.
        spins, patient = 0, _SPINS if self.runtime_name == "host" else 10 * _SPINS
        while received.ticket != ticket:
            spins += 1
            if spins % _SPINS == 0:
                group.failure.check()
                if time.monotonic() > deadline:
                    raise WaitTimeoutError(f"no counts of dispatch {ticket} came in {2 * group.timeout:g} s")
                if spins > patient:
                    time.sleep(1e-5)
        group.failure.check()
        return int(received.rows)

    def bad_expert(self, argument: str, experts: int) -> ArgumentError | None:
        """The error for a bad expert id in the dispatches whose rows have become known since the last call: the first
        of the latest that has one. None if all ids are good. `experts` is the number of experts that the caller can
        name.
        """
        received, config = self.workspace.received_rows, self.ep_config
        bad_rank = int(received.bad_rank)
        if bad_rank == lib.PROXYCCL_NO_PEER:
            return None
        token, k = divmod(int(received.bad_slot), config.topk)
        received.bad_rank = lib.PROXYCCL_NO_PEER
        expected = f"0 to {experts}, where {experts} drops the slot"
        if not self.workspace.experts.dropping_ids & NUMBER_DROPS:
            expected = f"0 to {experts - 1}, or -1, which drops the slot"
        return ArgumentError(argument, f"[{token}, {k}] on rank {bad_rank} is out of range; expected {expected}")

    @property
    def wanted_tokens(self) -> int:
        """The most tokens that any rank wanted to send in the last dispatch whose rows are known, if they were too many
        for the layer; else 0. It is the same on all ranks.
        """
        return int(self.workspace.received_rows.wanted_tokens)

    def bad_indices(self) -> bool:
        """Whether full_scatter_indices were not a permutation, in a dispatch that has ended since the last call."""
        received = self.workspace.received_rows
        bad, received.bad_index = bool(received.bad_index), 0
        return bad

    def most_rows(self) -> int:
        """The most rows of any rank, or padded of any expert, in the dispatches that have ended since the last call."""
        received = self.workspace.received_rows
        most, received.most_rows = int(received.most_rows), 0
        return most

    def receive(
        self,
        phases: int,
        desc: EPAllToAllLayoutDesc,
        inputs: DispatchInputs,
        rows: int,
        output: tuple[ArrayView | None, ...] | None,
        stream: StreamLike,
    ) -> None:
        """Queues the end of a dispatch, which fills the first `rows` rows of `output`: rows, weights and, if quantized,
        scales. With None it receives nothing.
        """
        desc.require_sent(self, "desc")
        desc.size_rows(rows if output is not None else 0)
        call = self._fill_inputs(phases, desc, inputs)
        if output is not None:
            self._fill_output(call, rows, output)
        if desc.counts_rows:
            call.received = ffi.cast("int32_t *", desc.pointer(RECEIVED))
        # Rows that nobody writes must show it: one that the caller's indices leave out, or in a gap.
        cleared = "first_rows" if inputs.scatter is not None else "row_slots" if self.layout.expert_alignment else ""
        at = desc.pointer(cleared) if cleared and desc.rows else 0
        fill = (lambda handle: self._fill(at, 4 * rows, handle)) if at else None
        if desc.stream is None:
            desc.stream = stream
        kept = (inputs, output)
        launch = self.dispatch_stored if desc.output_buffer else self.dispatch_plain
        config = self.ep_config
        if output is not None and self.dispatch_scaled is not None and inputs.tokens.dtype == config.token:
            launch, call.row_bytes = self.dispatch_scaled, config.hidden + self.scale_bytes
        self._launch(launch, call, stream, desc, kept, before=fill)
        desc.mark_received(refused=output is None)

    def copy(self, copies: Sequence[tuple[int, int, int]], stream: StreamLike, owners: tuple[object, ...]) -> None:
        """Queues copies in this device's memory, each to an address, from an address, of this many bytes."""
        runtime = self.group.runtime

        def launchable(handle: StreamLike) -> None:
            for target, source, nbytes in copies:
                if nbytes:
                    runtime.copy(target, source, nbytes, handle)

        self._queue(launchable, stream, None, owners)

    def repeat(
        self,
        desc: EPAllToAllLayoutDesc,
        tokens: ArrayView,
        output: ArrayView,
        stream: StreamLike,
        scales: ArrayView | None = None,
    ) -> None:
        """Queues a dispatch of other tokens with an existing layout. Their element type and row length may differ. With
        `scales` they are packed (`pack`), and their scales go there.
        """
        desc.require_received(self, "desc")
        call = self._fill_dispatch(SEND | RECEIVE, tokens, desc)
        call.redispatch = 1
        self._fill_output(call, desc.rows, (output, None, scales))
        own = desc.pointer("expert_ids") + 4 * self.nodes.own * self.ep_config.max_tokens * self.ep_config.topk
        call.expert_ids, call.id_bytes = ffi.cast("char *", own), 4
        self._agree("redispatch", tokens.dtype.name, desc.number)
        kept = (tokens.owner, output.owner, scales and scales.owner)
        self._launch(self.dispatch_plain, call, stream, desc, kept)

    @property
    def scales_while_storing(self) -> bool:
        """Whether a dispatch to output buffers takes tokens of the layer's type, and makes float8 rows of them."""
        return self.dispatch_scaled is not None

    def quantize(self, tokens: ArrayView, stream: StreamLike) -> ArrayView:
        """Queues the conversion of tokens to float8 rows with their scales after them: uint8 [T, hidden + bytes of
        scales].
        """
        assert self.quantize_launch is not None
        packed = self._packed(tokens)
        call = self._combine_call
        call.tokens, call.hidden = tokens.shape
        call.rows, call.output = ffi.cast("char *", tokens.ptr), ffi.cast("char *", packed.ptr)
        self._launch(self.quantize_launch, call, stream, None, (tokens.owner, packed.owner))
        return packed

    def pack(self, rows: ArrayView, scales: ArrayView, stream: StreamLike) -> ArrayView:
        """Queues the same for rows that are already in float8, and their scales."""
        packed = self._packed(rows)
        launch = self.pack_launch(rows.ptr, scales.ptr, packed.ptr, rows.shape[0])
        self._queue(launch, stream, None, (rows.owner, scales.owner, packed.owner))
        return packed

    def pack_launch(self, rows: int = 0, scales: int = 0, packed: int = 0, tokens: int = 0) -> Launch:
        """The launch of `pack`, by the addresses of its arrays."""
        assert self._pack is not None
        arguments = (rows, scales, packed, tokens, self.ep_config.hidden, self.scale_bytes)
        return self._pack.prepare(*self.grid, *arguments)

    @functools.cached_property
    def packed_rows(self) -> Array:
        """Memory for the float8 rows of repeated dispatches, of which one is under way at a time."""
        return allocate(self.group, (self.ep_config.max_tokens, self.ep_config.hidden + self.scale_bytes), "uint8")

    def _packed(self, rows: ArrayView) -> ArrayView:
        shape = (rows.shape[0], self.ep_config.hidden + self.scale_bytes)
        return input_view(self.group, self.arrays.new(rows.owner, shape, "uint8"), "input")

    def _fill_inputs(self, phases: int, desc: EPAllToAllLayoutDesc, inputs: DispatchInputs) -> Any:
        call = self._fill_dispatch(phases, inputs.tokens, desc)
        call.expert_ids = ffi.cast("char *", inputs.expert_ids.ptr)
        call.id_bytes = inputs.expert_ids.dtype.itemsize
        call.weights = ffi.cast("char *", inputs.weights.ptr if inputs.weights is not None else 0)
        if inputs.scatter is not None:
            call.scatter, call.scatter_tokens = ffi.cast("int32_t *", inputs.scatter.ptr), inputs.scatter.shape[0]
        call.wanted_tokens = inputs.wanted_tokens
        call.output_buffer = desc.output_buffer
        return call

    def _fill_output(self, call: Any, rows: int, output: tuple[ArrayView | None, ...]) -> None:
        call.capacity = rows
        for name, view in zip(("output", "output_weights", "output_scales"), output, strict=False):
            if view is not None:
                setattr(call, name, ffi.cast("char *", view.ptr))
        if call.output_scales:
            call.scale_bytes = self.scale_bytes
            call.scale_column = column_of(call.padded_rows) if self.scales_by_columns else 0

    def _padded_rows(self, desc: EPAllToAllLayoutDesc) -> int:
        """Rows that each expert has room for in the outputs of a dispatch, if rows are padded; else 0."""
        return desc.rows // self.ep_config.num_experts_per_rank if self.layout.padded_rows else 0

    def _fill_dispatch(self, phases: int, tokens: ArrayView, desc: EPAllToAllLayoutDesc) -> Any:
        call = self._dispatch_call
        ffi.memmove(call, bytes(ffi.sizeof("ProxycclDispatch")), ffi.sizeof("ProxycclDispatch"))
        call.phases, call.tokens, call.ticket = phases, tokens.shape[0], desc.number
        call.row_bytes = tokens.shape[1] * tokens.dtype.itemsize
        call.input = ffi.cast("char *", tokens.ptr)
        call.padded_rows = self._padded_rows(desc)
        desc.fill(ffi.addressof(call, "layout"))
        return call

    # -- combine ---

    def combine(
        self,
        call: str,
        phases: int,
        desc: EPAllToAllLayoutDesc,
        rows: ArrayView,
        weights: ArrayView | None,
        output: ArrayView | None,
        stream: StreamLike,
        slot_weights: ArrayView | None = None,
        added: Sequence[ArrayView] = (),
        order: ArrayView | None = None,
    ) -> None:
        """Queues those phases of a combine."""
        desc.require_received(self, "desc")
        filled = self._combine_call
        filled.phases, filled.tokens = phases, desc.num_dispatch_token_cur_rank
        filled.hidden = rows.shape[-1]
        buffer, at, outputs = 0, rows.ptr, self.workspace.outputs
        loaded = desc.output_buffer and weights is None and phases == SEND | RECEIVE
        if loaded and outputs is not None and not self.workspace.experts.local_combine:
            buffer = outputs.holding(rows)
            if not buffer and outputs.passing and call == "combine":  # a copy here takes less time than sending
                buffer, at = outputs.passing, outputs.address(outputs.passing)
        filled.rows, filled.rows_buffer = ffi.cast("char *", at), buffer
        filled.weights = ffi.cast("float *", 0)
        if weights is not None:  # an empty tensor of torch is at 0, but the rows of peers have weights all the same
            filled.weights = ffi.cast("float *", weights.ptr or self.workspace.experts.workspace)
        filled.slot_weights = ffi.cast("float *", slot_weights.ptr if slot_weights is not None else 0)
        filled.output = ffi.cast("char *", output.ptr if output is not None else 0)
        first, second = [*(view.ptr for view in added), 0, 0][:MOST_ADDED]
        ids = (0, 0) if order is None else (order.ptr, order.dtype.itemsize)
        lib.proxyccl_expert_combine_order(filled, first, second, *ids)
        ffi.memmove(ffi.addressof(filled, "layout"), NO_TABLES, len(NO_TABLES))
        desc.fill(ffi.addressof(filled, "layout"))
        if phases & SEND:
            self._agree(call_name(call, weights=weights is not None), rows.dtype.name, desc.number)
        if at != rows.ptr:
            self.copy([(at, rows.ptr, rows.nbytes)], stream, (rows.owner,))
        views = (weights, slot_weights, output, *added, order)
        arrays = [rows.owner, *(view.owner for view in views if view is not None)]
        self._launch(self._combine[rows.dtype.name], filled, stream, desc, (arrays,))

    def combine_launch(self, dtype: str) -> Launch:
        """The combine of rows of a type, to `copy`."""
        return self._combine[dtype]

    def weigh(
        self,
        values: ArrayView,
        weights: ArrayView | None,
        stream: StreamLike,
        *,
        desc: EPAllToAllLayoutDesc | None = None,
        others: ArrayView | None = None,
        products: ArrayView | None = None,
    ) -> None:
        """Queues the multiplication of rows by their weights, in place. Each product of an element is rounded.

        Args:
            values: [R, hidden] of the tokens' type.
            weights: float32 [R]; None for 1.
            stream: where.
            desc: the rows' dispatch, if those that it has not filled become zero.
            others: [R, hidden] of the tokens' type.
            products: float32 [R]: each row's scalar product with that of `others`, before it is multiplied.
        """
        slots = desc.pointer("row_slots") if desc is not None and desc.has_gaps else 0
        received = desc.pointer(RECEIVED) if desc is not None and desc.counts_rows and not slots else 0
        if weights is None and others is None and not slots and not received:
            return  # all rows are filled, and stay as they are
        call = self._weighing
        call.rows, call.hidden = values.shape[0], values.shape[1]
        call.values = ffi.cast("char *", values.ptr)
        call.weights = ffi.cast("float *", weights.ptr if weights is not None else 0)
        call.others = ffi.cast("char *", others.ptr if others is not None else 0)
        call.products = ffi.cast("float *", products.ptr if products is not None else 0)
        call.row_slots, call.received = ffi.cast("int32_t *", slots), ffi.cast("int32_t *", received)
        views = (values, weights, others, products)
        kept = tuple(view.owner for view in views if view is not None)
        self._launch(self._weigh, call, stream, desc, (kept,))

    def collected_type(self, values: ArrayView) -> str:
        """The type in which `collect` takes values: their own if it is the tokens' or weights', else the weights'."""
        name = values.dtype.name
        return name if name in self._combine else self.ep_config.weight.name

    def collect(self, desc: EPAllToAllLayoutDesc, values: ArrayView, stream: StreamLike) -> Any:
        """Queues the return of each row's value to the row's slot: [T, topk] of the values' type, zero for slots
        without a row. It is a combine of rows that are zero except in the slot's own column.
        """
        desc.require_received(self, "desc")
        config, group, element = self.ep_config, self.group, values.dtype
        matrix = self.arrays.new(values.owner, (desc.rows, config.topk), element)
        slots = self.arrays.new(values.owner, (desc.num_dispatch_token_cur_rank, config.topk), element)
        spread, slotted = input_view(group, matrix, "values"), input_view(group, slots, "values")
        kernel = group.runtime.shipped("experts/spread.h", "expert_spread")
        launch = kernel.prepare(
            *self.grid, values.ptr, desc.pointer("row_slots"), spread.ptr, desc.rows, config.topk, element.itemsize
        )
        if desc.rows:
            self._queue(launch, stream, desc, (values.owner, matrix))
        self.combine("collect", SEND | RECEIVE, desc, spread, None, slotted, stream)
        return slots

    def collect_choices(self, desc: EPAllToAllLayoutDesc, values: ArrayView, stream: StreamLike) -> Any:
        """Queues the same with a row for each rank, for float32 [R, topk]: sums of a token's values over its rows."""
        slots = self.arrays.new(values.owner, (desc.num_dispatch_token_cur_rank, self.ep_config.topk), "float32")
        slotted = input_view(self.group, slots, "values")
        self.combine("collect", SEND | RECEIVE, desc, values, None, slotted, stream)
        return slots

    # -- launching ---

    def stream_for(self, stream: StreamLike, x: Any) -> StreamLike:
        """The stream of a call. Refuses an invalid stream before the ranks compare the call."""
        found = self.group.launches.stream_for(stream, x)
        self.group.runtime.stream_handle(found)
        return found

    def _agree(self, call: str, dtype: str, number: int, most_tokens: int = 0) -> None:
        self.group.launches.agree(self.logged(call, dtype, number, most_tokens))

    def logged(self, call: str, dtype: str, number: int, most_tokens: int = 0) -> CollectiveCall:
        """A call on dispatch `number` as the ranks compare it; of a dispatch with the most tokens of a rank."""
        return CollectiveCall(call, dtype, root=logged_number(number), count=most_tokens, of=self._number)

    def _launch(
        self,
        launch: Launch,
        call: Any,
        stream: StreamLike,
        desc: EPAllToAllLayoutDesc | None,
        owners: tuple[object, ...],
        before: Any = None,
    ) -> None:
        raw = bytes(ffi.buffer(call))

        def launchable(handle: StreamLike) -> None:
            launch.replace(1, raw)
            if before is not None:
                before(handle)
            launch(handle)

        self._queue(launchable, stream, desc, owners)

    def _queue(
        self,
        launchable: Callable[[StreamLike], None],
        stream: StreamLike,
        desc: EPAllToAllLayoutDesc | None,
        owners: tuple[object, ...],
    ) -> None:
        """Queues a launchable, and keeps the arrays of `owners` and the tables of `desc` that it uses until then."""
        kept: tuple[object, ...] = ()
        if desc is not None and (desc.stream != stream or not isinstance(stream, CurrentStream)):
            kept = (desc, desc.table_owners)  # tables that were made on another stream
        self.group.launches.launch(launchable, stream, owners, kept)

    def _fill(self, ptr: int, nbytes: int, handle: StreamLike) -> None:
        self.group.runtime.fill(ptr, 0xFF, nbytes, handle)
