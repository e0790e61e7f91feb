"""The base class of forms, and the parts of a layer that forms share. A *form* is a call of a layer that was prepared
for certain kinds of arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proxyccl.channels.calls.launches import CurrentStream, Launchable
from proxyccl.channels.expert_parallel.arguments import input_array
from proxyccl.channels.expert_parallel.config import NUMBER_DROPS
from proxyccl.channels.expert_parallel.context import DispatchCombineContext
from proxyccl.channels.expert_parallel.layout import NOT_RECEIVED, EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.options import LayerOptions
from proxyccl.channels.expert_parallel.tables import Tables
from proxyccl.channels.segment.call_log import encode_fields
from proxyccl.channels.segment.calls import ROOT_FIELD, CollectiveCall, register_names
from proxyccl.device._native import ffi, lib
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.arrays.libraries import libraries
from proxyccl.device.errors import ArgumentError, CapacityError, ProxyCCLError
from proxyccl.device.kernel import Launch
from proxyccl.device.runtime import Runtime, StreamLike
from proxyccl.device.stream_operations import Operation, StreamOperations


@dataclass(frozen=True)
class Arguments:
    """The names of a layer's arguments in error texts. `spare_rows`: whether a combine ignores rows after the last
    received row.
    """

    tokens: str = "input"
    ids: str = "exp_indices"
    weight: str = "weight"
    values: str = "input"
    rows: str = "input"
    spare_rows: bool = False


@dataclass(frozen=True)
class LayerParts:
    """The parts of a layer that forms need. Layers that share `ctx` may allow different numbers of tokens per call."""

    ctx: DispatchCombineContext
    options: LayerOptions
    arguments: Arguments = Arguments()

    def leading(self, rows: int) -> tuple[int, ...]:
        """Returns all extents except the last of an array with `rows` rows."""
        padded = self.options.padded_rows
        return (self.options.config.num_experts_per_rank, padded) if padded else (rows,)

    def given_rows(self, input: Any, count: int, argument: str) -> tuple[ArrayView, ArrayView | None]:
        """Returns views of a caller's tokens and, if `input` is a pair, of their scales. `count` is the number of
        tokens; -1 accepts any number."""
        options, group = self.options, self.ctx.group
        config = options.config
        if not isinstance(input, tuple):
            return input_array(group, input, argument, (count, config.hidden), config.token.name), None
        if not options.quantized or len(input) != 2:
            raise ArgumentError(argument, "a pair of rows and scales needs a layer with dispatch_dtype")
        rows = input_array(group, input[0], argument, (count, options.pair_width), options.pair_dtype)
        shape = (rows.shape[0], options.scales)
        return rows, input_array(group, input[1], argument, shape, "float32")

    def own_desc(self, desc: Any) -> EPAllToAllLayoutDesc:
        """Returns a caller's descriptor. Raises ArgumentError unless the descriptor belongs to a dispatch of this
        layer, and the dispatch was received.
        """
        self.ctx.require_usable()
        if not isinstance(desc, EPAllToAllLayoutDesc):
            raise ArgumentError(
                "ep_a2a_layout_desc", f"must be the descriptor that a dispatch gave, not {type(desc).__name__}"
            )
        desc.require_received(self.ctx, "ep_a2a_layout_desc")
        if self.options.padded_rows and desc.rows != self.options.fixed_rows:
            raise ArgumentError(
                "ep_a2a_layout_desc",
                f"has {desc.rows} padded rows; this layer has {self.options.fixed_rows} (see narrowed)",
            )
        return desc

    def is_capturing(self, stream: StreamLike) -> bool:
        runtime = self.ctx.group.runtime
        if runtime.name == "host":
            return False
        return runtime.capture_of(stream if type(stream) is CurrentStream else runtime.stream_handle(stream)) != 0

    def outlives_no_graph(self, stream: StreamLike) -> bool:
        """Returns whether an output's memory may be reused after the output's arrays have been freed. The result is
        False while a graph is captured, because the graph may run again later.
        """
        return not self.options.keeps_outputs or not self.is_capturing(stream)

    def refuse_capture(self, stream: StreamLike) -> None:
        """Raises ArgumentError if a call would wait for its number of rows on a stream that is being captured."""
        if self.options.fixed_rows is None and self.is_capturing(stream):
            raise ArgumentError(
                "max_recv_tokens",
                "is needed to capture a dispatch in a graph, which can't wait for its size",
            )

    def learn_counts(self, desc: EPAllToAllLayoutDesc) -> ProxyCCLError | None:
        """Reads each expert's number of rows; `await_rows` must have returned before. If all ranks refuse the call,
        returns the error that they raise.
        """
        ctx, options = self.ctx, self.options
        if options.by_rank or options.expert_alignment:
            desc.chosen_rows = ctx.workspace.chosen_rows
        wanted, bad = int(ctx.workspace.received_rows.wanted_tokens), self._bad_expert()
        if wanted:
            return CapacityError(f"a rank dispatches {wanted} tokens; max_tokens is {options.most_of_call}", wanted)
        return bad

    def _bad_expert(self) -> ArgumentError | None:
        """Returns the error for an invalid expert id, or None. Checks the dispatches whose number of rows became known
        since the last call of this function. The error names the first invalid id of the latest dispatch that has an
        invalid id.
        """
        received, experts = self.ctx.workspace.received_rows, self.options.all_experts
        bad_rank = int(received.bad_rank)
        if bad_rank == lib.PROXYCCL_NO_PEER:
            return None
        token, k = divmod(int(received.bad_slot), self.options.config.topk)
        received.bad_rank = lib.PROXYCCL_NO_PEER
        expected = f"0 to {experts}, where {experts} drops the slot"
        if not self.options.dropping_ids & NUMBER_DROPS:
            expected = f"0 to {experts - 1}, or -1, which drops the slot"
        what = f"[{token}, {k}] on rank {bad_rank} is out of range; expected {expected}"
        return ArgumentError(self.arguments.ids, what)

    def check_ended(self) -> None:
        """Raises the errors of the dispatches that have completed since the last call: see `EPAll2AllLayer.check`."""
        received, options = self.ctx.workspace.received_rows, self.options
        most, received.most_rows = int(received.most_rows), 0
        bad_indices, received.bad_index = bool(received.bad_index), 0
        bad = self._bad_expert()
        if bad_indices:
            raise ArgumentError(
                "full_scatter_indices", "must be a permutation of this rank's rows, for the tokens of all ranks"
            )
        if options.fixed_rows is None:
            return
        if bad is not None:
            raise bad
        if options.padded_rows and most > options.padded_rows:
            raise CapacityError(
                f"an expert received {most} rows, as tokens chose it more than once; those beyond its room of "
                f"{options.padded_rows} rows were left out",
                most,
            )
        if not options.padded_rows and most > options.fixed_rows:
            raise CapacityError(
                f"a rank received {most} rows; those beyond max_recv_tokens, {options.fixed_rows}, were left out", most
            )

    def checked(self, made: Any, stream: StreamLike) -> Any:
        """Returns `made`, the results of a call. If the call was synchronous (a call without a stream on the host
        runtime), runs `check_ended` first.
        """
        if stream is None and self.ctx.runtime_name == "host":
            self.check_ended()
        return made

    @property
    def sums_on_own_node(self) -> bool:
        experts = self.ctx.workspace.experts
        return experts.nodes == 1 and not experts.local_combine

    @property
    def sums_ranks_in_turn(self) -> bool:
        """Whether a combine can use `order_ids`: true if no rank is lost, the layer has no placement, and a token's
        rank sums one row, or one partial sum, from each rank.
        """
        experts = self.ctx.workspace.experts
        by_rank = experts.local_combine or self.options.by_rank
        return bool(experts.nodes == 1 and by_rank and self.ctx.places is None)


def address_of(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))


class CallForm:
    """A form: a call of a layer that was prepared for certain kinds of arrays. For each call, the C code fills in the
    addresses of the arrays and the numbers of tokens.

    Args:
        arrays: the arrays of the first call of the form. The library of the first array makes the results.
        name, dtype, most_tokens: the parts of a call that ranks compare. Ranks also compare the layer's number and, for
            each call, the number of its dispatch.
    """

    def __init__(self, parts: LayerParts, arrays: tuple[Any, ...], name: str, dtype: str, most_tokens: int = 0) -> None:
        self._parts, self._ctx, self._group = parts, parts.ctx, parts.ctx.group
        self._arrays = parts.ctx.arrays.like(arrays[0])
        self._is_torch = all(libraries[type(x)].is_torch for x in arrays if x is not None)
        self._on_host = parts.ctx.runtime_name == "host"
        compared = CollectiveCall(name, dtype, root=0, count=most_tokens, of=parts.ctx.number)
        self._fields = encode_fields(compared.encode())

    def common(self, first: Launchable, second: Launchable) -> tuple[Any, ...]:
        """Returns the constructor arguments that all forms in C share (layer_form.h): `first` launches a whole call or
        a call's first half, and `second` the remaining parts.
        """
        in_order = self._is_torch and not self._on_host
        current = libraries[self._arrays.kind].current_of_device() if in_order else None
        number = address_of(self._fields.fields) + ffi.sizeof("uint64_t") * ROOT_FIELD
        calls, device = self._group.launches.calls, self._group.runtime.device
        address = None if self._arrays.is_torch else self._arrays.address
        queued = self._stream, self._queue, device, number, address
        parts = self.prepared(first), self.prepared(second, compared=False)
        return calls, self._on_host, current, CurrentStream, *queued, *parts

    def prepared(self, launchable: Launchable, *, compared: bool = True) -> tuple[Any, ...]:
        """Returns the parts of a launch that the C code needs (form.h). `compared`: whether ranks compare the call
        before this launch.
        """
        issue, callers = self._group.launches.issuer(launchable)
        fields = self._fields if compared else ffi.NULL
        return issue, callers, address_of(fields), address_of(launchable.prepared), (fields, launchable)

    def _described(self, tables: Tables) -> tuple[Any, ...]:
        return EPAllToAllLayoutDesc, NOT_RECEIVED, self._ctx, self._ctx.numbers, tables

    def _stream(self, x: Any, given: StreamLike) -> StreamLike:
        """Returns a call's stream: the caller's, or on a GPU the current stream of the library of `x`. Raises an error
        for an invalid stream before the dispatch gets a number.
        """
        stream = self._ctx.stream_for(given, x)
        return int(stream) if isinstance(stream, CurrentStream) and not self._is_torch else stream

    def _queue(
        self, desc: Any, prepared: tuple[Any, Launchable], stream: StreamLike, owners: tuple[object, ...]
    ) -> None:
        # `owners` lacks the memory that kernels before a dispatch fill, because the layer owns this memory.
        self._ctx.queue(*prepared, stream, desc, (*owners, self))


def kernel_before(parts: LayerParts, *, is_pair: bool, quantizes: bool) -> tuple[list[Launch], tuple[int, ...]]:
    """Returns a list with the launch of the kernel that packs rows and scales, or quantizes tokens, before a dispatch;
    an empty list if no such kernel is needed. Also returns the addresses of the kernel's arguments that the C code
    fills in (dispatch_form.c).
    """
    ctx = parts.ctx
    if is_pair:
        assert ctx.pack is not None
        sizes = parts.options.pair_width, parts.options.scale_bytes
        launch = ctx.pack.prepare(*ctx.grid, 0, 0, ctx.packed_rows.ptr, 0, *sizes)
        rows_at, scales_at, _, tokens_at = (address_of(launch.packed(index)) for index in range(4))
        return [launch], (2, 0, rows_at, scales_at, tokens_at, ctx.packed_rows.ptr)
    if not quantizes:
        return [], (0, 0, 0, 0, 0, 0)
    assert ctx.quantize_launch is not None
    launch = ctx.quantize_launch.copy()
    call = ffi.cast("ProxycclCombine *", launch.packed(1))
    call.hidden, call.output = parts.options.config.hidden, ffi.cast("char *", ctx.packed_rows.ptr)
    return [launch], (1, address_of(call), 0, 0, 0, ctx.packed_rows.ptr)


def in_order(runtime: Runtime, operations: Sequence[Operation]) -> Launchable:
    """Returns a launchable that performs stream operations in order; the last operation is a launch."""
    last = operations[-1]
    return last if len(operations) == 1 and isinstance(last, Launch) else StreamOperations(runtime, operations)


def name_of(call: str, weights: Any, *, halves: bool = False, indices: Any = None) -> str:
    """Returns the name by which ranks compare a call. The name includes those arguments that must be passed either on
    all ranks or on none.
    """
    called = f"{call}_send" if halves else call
    return called + (" with weights" if weights is not None else "") + (" by indices" if indices is not None else "")


register_names("redispatch")
for _call in ("prepare", "dispatch", "dispatch_send", "combine", "combine_send", "collect"):
    register_names(*(name_of(_call, weights, indices=indices) for weights in (None, 1) for indices in (None, 1)))
