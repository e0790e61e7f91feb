"""One dispatch of a layer, from the caller's arrays to the rows that came."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from proxyccl.channels.arguments import input_view
from proxyccl.channels.expert_parallel.arguments import index_array, input_array
from proxyccl.channels.expert_parallel.arrays import first_rows
from proxyccl.channels.expert_parallel.context import GATHER, LAYOUT, RECEIVE, ROUTE, SEND, TELL, DispatchInputs
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.options import FLOAT8
from proxyccl.channels.expert_parallel.output_buffers import NO_BUFFER
from proxyccl.channels.expert_parallel.parts import LayerParts
from proxyccl.channels.expert_parallel.recording import Dispatched
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.errors import ArgumentError, CapacityError, ProxyCCLError
from proxyccl.device.runtime import StreamLike


@dataclass(frozen=True)
class Output:
    """Arrays for the caller.

    Attributes:
        rows, weights: as a dispatch returns them.
        views: where the dispatch puts rows, weights and scales.
        copies: copies to make then, each with its target's address, its source's, and its number of bytes.
    """

    rows: Any
    weights: Any
    views: tuple[ArrayView | None, ...]
    copies: tuple[tuple[int, int, int], ...] = ()


class DispatchCall:
    """A dispatch whose arguments are checked, on this rank and against the other ranks' calls.

    It is made by `run`, or in two halves by `send` and `receive`; the rows of halves are new arrays.

    Args:
        parts: of the layer.
        input, exp_indices, weight, full_scatter_indices, stream: see `EPAll2AllLayer.dispatch`.
        halves: whether it is made in two halves.
        buffered: whether the rows of a whole call may lie in an output buffer, and not only pass it.

    Attributes:
        inputs: the arrays that kernels read.
        desc: the descriptor, filled when the rows are received.
        stream: of the call.
        output: with a fixed number of rows, the arrays that the call fills and returns; else None.
        recorded: the caller's tokens and weights, if a library records a call in halves.

    Raises:
        ArgumentError: an argument is wrong.
        MismatchError: another rank makes another call.
    """

    def __init__(
        self,
        parts: LayerParts,
        input: Any,
        exp_indices: Any,
        weight: Any,
        full_scatter_indices: Any,
        stream: StreamLike,
        *,
        halves: bool = False,
        buffered: bool = False,
    ) -> None:
        ctx = parts.ctx
        self._parts, self._taken = parts, NO_BUFFER
        self.recorded: tuple[Any, ...] = ()
        self.inputs = self._take(input, exp_indices, weight, full_scatter_indices, stream, buffered=buffered)
        self._like, rows = self.inputs.tokens.owner, parts.options.fixed_rows
        if not halves:
            refuse_capture(parts, self.stream)
            self._taken = parts.take_buffer(self._like, self.stream, stream, buffered=buffered)
        most = parts.options.most_tokens if self.is_at_once else rows
        name, fixed = "dispatch_send" if halves else "dispatch", rows is not None
        self.desc = ctx.describe(
            name,
            self.inputs,
            self._taken,
            most_rows=most,
            counts_rows=fixed,
            most_tokens=parts.options.most_of_call,
        )
        self.output = None if rows is None else self._new_output(rows, self._new_weights(rows))

    @property
    def is_at_once(self) -> bool:
        """Whether rows of a number that is not known yet go to an output buffer, by the kernel that counts them."""
        return self._taken.number != 0 and self._parts.options.fixed_rows is None

    def run(self) -> Dispatched:
        """Makes the whole call."""
        made = self._run()
        check_waited(self._parts, self.stream)
        return made

    def _run(self) -> Dispatched:
        if self.output is not None:
            return self._receive_fixed(ROUTE | SEND | GATHER | RECEIVE, self.output, self.stream)
        if self.is_at_once:
            return self._receive_at_once()
        self._parts.ctx.begin(ROUTE | GATHER | TELL, self.desc, self.inputs, self.stream)
        return self._receive_exact(SEND | RECEIVE, self.stream)

    def send(self) -> None:
        """Makes the first half."""
        self._parts.ctx.begin(ROUTE | SEND, self.desc, self.inputs, self.stream)

    def receive(self, stream: StreamLike) -> Dispatched:
        """Makes the second half on a stream."""
        if self.output is not None:
            return self._receive_fixed(GATHER | RECEIVE, self.output, stream)
        self._parts.ctx.begin(GATHER | TELL, self.desc, self.inputs, stream)
        return self._receive_exact(RECEIVE, stream)

    # -- the caller's arrays ---

    def _take(
        self,
        input: Any,
        exp_indices: Any,
        weight: Any,
        full_scatter_indices: Any,
        stream: StreamLike,
        *,
        buffered: bool,
    ) -> DispatchInputs:
        """Checks the caller's arrays. Returns what kernels read: with float8 packed tokens, and ids of experts that are
        left.
        """
        ctx, options, surviving = self._parts.ctx, self._parts.options, self._parts.surviving
        tokens, scales = self._parts.given_rows(input, -1)
        slots = (tokens.shape[0], options.config.topk)
        self._check_tokens(slots[0], scaled=scales is not None)
        if options.takes_wide_ids:
            ids = index_array(ctx.group, exp_indices, "exp_indices", slots)
        else:
            ids = input_array(ctx.group, exp_indices, "exp_indices", slots, "int32")
        weights = scatter = lost = None
        if weight is not None:
            weights = input_array(ctx.group, weight, "weight", slots, options.config.weight.name)
        if full_scatter_indices is not None:
            scatter = self._scatter(full_scatter_indices)
        wanted = 0
        if slots[0] > options.most_of_call:  # nothing is sent but the number, so that all ranks raise the same
            wanted = slots[0]
            tokens, ids = _none_of(tokens), _none_of(ids)
            scales, weights = scales and _none_of(scales), weights and _none_of(weights)
        self.stream = ctx.stream_for(stream, tokens.owner)
        if scales is not None:
            tokens = ctx.pack(tokens, scales, self.stream)
        elif options.quantized and not (buffered and ctx.scales_while_storing):
            tokens = ctx.quantize(tokens, self.stream)
        if surviving is not None:
            ids, lost = surviving.renumber(ids, self.stream)
        return DispatchInputs(tokens, ids, weights, scatter, lost, wanted)

    def _check_tokens(self, count: int, *, scaled: bool) -> None:
        options = self._parts.options
        most = options.most_of_call
        if count > most and not (options.grows and options.fixed_rows is None):
            raise ArgumentError("input", f"has {count} tokens; expected at most max_tokens, {most}")
        if options.quantized and not scaled and not options.quantizes:
            raise ArgumentError("input", f"must be a pair of rows and scales, with {options.scales} scales of a row")

    def _scatter(self, full_scatter_indices: Any) -> ArrayView:
        options = self._parts.options
        if options.layout != "expert":
            raise ArgumentError("full_scatter_indices", f'can\'t be given with layout="{options.layout}"')
        if options.expert_alignment:
            raise ArgumentError("full_scatter_indices", "can't be given with expert_alignment")
        shape = (-1, options.config.topk)
        return input_array(self._parts.ctx.group, full_scatter_indices, "full_scatter_indices", shape, "int32")

    # -- the rows ---

    def _receive_exact(self, phases: int, stream: StreamLike) -> Dispatched:
        ctx, desc = self._parts.ctx, self.desc
        rows = ctx.await_rows(desc)
        bad = learn_counts(self._parts, desc)
        if bad is not None:
            end = RECEIVE if phases == RECEIVE else LAYOUT  # rows that were sent must still be received
            ctx.receive(end, desc, self.inputs, 0, None, stream)
            raise bad
        output = self._new_output(rows, self._new_weights(rows))
        ctx.receive(phases, desc, self.inputs, rows, output.views, stream)
        return self._received(output, stream)

    def _receive_at_once(self) -> Dispatched:
        """Makes the whole call by one kernel, to an output buffer, which has room for all rows that may come. The CPU
        learns their number while they are on their way.
        """
        ctx, desc, most = self._parts.ctx, self.desc, self._parts.options.most_tokens
        phases = ROUTE | SEND | GATHER | RECEIVE | TELL
        weights = self._new_weights(most)
        ctx.receive(phases, desc, self.inputs, most, self._views_of_buffer(weights), self.stream)
        desc.rows = rows = ctx.await_rows(desc)
        refuse_bad(self._parts, desc)
        output = self._new_output(rows, None if weights is None else first_rows(weights, rows))
        return self._received(output, self.stream)

    def _receive_fixed(self, phases: int, output: Output, stream: StreamLike) -> Dispatched:
        self._parts.ctx.receive(phases, self.desc, self.inputs, self.desc.rows, output.views, stream)
        return self._received(output, stream)

    def _received(self, output: Output, stream: StreamLike) -> Dispatched:
        if output.copies:
            self._parts.ctx.copy(output.copies, stream, (output.rows,))
        return output.rows, output.weights, self.desc

    def _new_weights(self, rows: int) -> Any:
        parts, config = self._parts, self._parts.options.config
        if self.inputs.weights is None:
            return None
        leading = parts.leading(rows)
        shape = (*leading, config.topk) if parts.options.by_rank else leading
        return parts.ctx.arrays.new(self._like, shape, config.weight)

    def _new_output(self, rows: int, weights: Any) -> Output:
        parts, taken = self._parts, self._taken
        outputs, group = parts.ctx.workspace.outputs, parts.ctx.group
        output = parts.new_rows(self._like, rows, float8=parts.options.quantized, taken=taken)
        values, scales = output if parts.options.quantized else (output, None)
        view = input_view(group, values, "out")
        of_weights = None if weights is None else input_view(group, weights, "out")
        views = [view, of_weights, None if scales is None else parts.scales_view(scales, view)]
        copies = []
        if taken.passed and outputs is not None:
            for place, address in ((0, outputs.address(taken.number)), (2, outputs.scales_address(taken.number))):
                passed = views[place]
                if passed is not None:
                    copies.append((passed.ptr, address, passed.nbytes))
                    views[place] = replace(passed, ptr=address)
        return Output(output, weights, tuple(views), tuple(copies))

    def _views_of_buffer(self, weights: Any) -> tuple[ArrayView | None, ...]:
        """Views of the rows, their weights and their scales in the output buffer, for the most rows that may come."""
        parts, config, outputs = self._parts, self._parts.options.config, self._parts.ctx.workspace.outputs
        assert outputs is not None
        group, most, here = parts.ctx.group, parts.options.most_tokens, self.inputs.tokens.device
        number, element = self._taken.number, as_dtype(FLOAT8) if parts.options.quantized else config.token
        rows = ArrayView(outputs.address(number), (most, config.hidden), element, here, True, self._taken.whole)
        of_weights = None if weights is None else input_view(group, weights, "out")
        if not parts.options.quantized:
            return rows, of_weights, None
        shape, scale = (most, parts.options.scales), as_dtype("float32")
        return rows, of_weights, replace(rows, ptr=outputs.scales_address(number), shape=shape, dtype=scale)


def refuse_capture(parts: LayerParts, stream: StreamLike) -> None:
    """Raises ArgumentError if a call would wait for its number of rows on a stream that is being captured."""
    if parts.options.fixed_rows is None and parts.is_capturing(stream):
        raise ArgumentError(
            "max_recv_tokens",
            "is needed to capture a dispatch in a graph, which can't wait for its size",
        )


def learn_counts(parts: LayerParts, desc: EPAllToAllLayoutDesc) -> ProxyCCLError | None:
    """Reads how many rows chose each expert, when `await_rows` has returned. Returns the error with which all ranks
    refuse the call, if there is one.
    """
    ctx, options = parts.ctx, parts.options
    if options.by_rank or options.expert_alignment:
        desc.chosen_rows = ctx.workspace.chosen_rows
    wanted, bad = ctx.wanted_tokens, ctx.bad_expert("exp_indices", options.all_experts)
    if wanted:
        return CapacityError(f"a rank dispatches {wanted} tokens; max_tokens is {options.most_of_call}", wanted)
    return bad


def refuse_bad(parts: LayerParts, desc: EPAllToAllLayoutDesc) -> None:
    """Raises that error for a call whose rows are on their way already, and which all ranks forget."""
    bad = learn_counts(parts, desc)
    if bad is not None:
        desc.rows = 0
        desc.mark_received(refused=True)
        raise bad


def check_ended(parts: LayerParts) -> None:
    """See `EPAll2AllLayer.check`."""
    ctx, options = parts.ctx, parts.options
    most, bad = ctx.most_rows(), ctx.bad_expert("exp_indices", options.all_experts)
    if ctx.bad_indices():
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


def check_waited(parts: LayerParts, stream: StreamLike) -> None:
    """`check_ended`, if a call on this stream has waited for its end, as on the host runtime those without one do."""
    if stream is None and parts.ctx.runtime_name == "host":
        check_ended(parts)


def _none_of(view: ArrayView) -> ArrayView:
    """The same array without any row."""
    return replace(view, shape=(0, *view.shape[1:]))
