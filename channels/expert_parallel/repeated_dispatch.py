"""A dispatch like one that was made before, whole or in two halves; and one by the routing of an earlier dispatch."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from proxyccl.channels.arguments import input_view
from proxyccl.channels.expert_parallel.arrays import first_rows, part_maker
from proxyccl.channels.expert_parallel.context import GATHER, LAYOUT, RECEIVE, ROUTE, SEND, TELL
from proxyccl.channels.expert_parallel.dispatch_call import check_ended, learn_counts, refuse_bad
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.options import FLOAT8
from proxyccl.channels.expert_parallel.output_buffers import NO_BUFFER, TakenBuffer
from proxyccl.channels.expert_parallel.parts import LayerParts
from proxyccl.channels.expert_parallel.recording import Dispatched
from proxyccl.channels.expert_parallel.repeated_call import (
    COPY_LATER,
    GivenTokens,
    Launchable,
    RepeatedCall,
    launchable_after,
    name_of,
)
from proxyccl.channels.expert_parallel.tables import RECEIVED
from proxyccl.device._native import ffi, lib
from proxyccl.device.runtime import StreamLike
from proxyccl.device.stream_operations import CopyBytes, StreamOperations


class NewOutput(Struct):
    """New arrays for a result.

    Attributes:
        rows: as a dispatch returns them.
        weights: of the rows, or None.
        addresses: of the rows, of their scales and of the weights; 0 for those that there are not.
    """

    rows: Any
    weights: Any
    addresses: tuple[int, int, int]


_NO_OUTPUT = NewOutput(None, None, (0, 0, 0))


class _Outputs:
    """Makes arrays for the results of a layer's calls.

    Args:
        like: an array of the library that makes them.
        float8: whether rows are in float8, with scales.
        weighted: whether rows have weights.
    """

    def __init__(self, parts: LayerParts, like: Any, *, float8: bool, weighted: bool) -> None:
        options, arrays = parts.options, parts.ctx.arrays
        config = options.config
        self._leading, self._address = parts.leading, arrays.address
        self._elements = (config.hidden,)
        self._scales = (config.hidden // options.scale_elements,) if float8 else None
        self._weights = None if not weighted else (config.topk,) if options.by_rank else ()
        self._rows_in = part_maker(like, self._elements, FLOAT8 if float8 else config.token)
        self._scales_in = part_maker(like, self._scales or (), "float32")
        self._new_rows = arrays.maker(like, FLOAT8 if float8 else config.token)
        self._new_scales, self._new_weights = arrays.maker(like, "float32"), arrays.maker(like, config.weight)

    def make(self, rows: int) -> NewOutput:
        """Arrays for this many rows."""
        made, address = self.make_rows(rows), self._address
        rows_at, scales_at = (address(made), 0) if self._scales is None else (address(made[0]), address(made[1]))
        weights, weights_at = self.make_weights(rows)
        return NewOutput(made, weights, (rows_at, scales_at, weights_at))

    def make_rows(self, rows: int) -> Any:
        """New rows as a dispatch returns them."""
        leading = self._leading(rows)
        values = self._new_rows(leading + self._elements)
        return values if self._scales is None else (values, self._new_scales(leading + self._scales))

    def rows_in(self, buffer: Any, scales_at: int, rows: int) -> Any:
        """Rows as a dispatch returns them, in an array of bytes with their scales at an offset."""
        values = self._rows_in(buffer, 0, rows)
        return values if self._scales is None else (values, self._scales_in(buffer, scales_at, rows))

    def make_weights(self, rows: int) -> tuple[Any, int]:
        """The array for the weights of this many rows, and its address; None and 0 if they have none."""
        if self._weights is None:
            return None, 0
        weights = self._new_weights(self._leading(rows) + self._weights)
        return weights, self._address(weights)


class RepeatedDispatch(RepeatedCall):
    """A dispatch.

    One launch makes all of it, except where the CPU must know the number of rows before they are received, and in
    halves. A kernel before it may make float8 rows of the tokens, or pack those of the caller.

    Args:
        parts: of the layer.
        x, ids, weight: of the earlier call.
        halves: whether it is made in two halves.
        buffered: whether the rows of a whole call may lie in an output buffer.
    """

    def __init__(self, parts: LayerParts, x: Any, ids: Any, weight: Any, *, halves: bool, buffered: bool) -> None:
        like = x[0] if isinstance(x, tuple) else x
        super().__init__(parts, like, name_of("dispatch", weight, halves=halves), parts.options.config.token.name)
        ctx, options = parts.ctx, parts.options
        config = self._config = options.config
        self._buffers = ctx.workspace.outputs if buffered and not halves else None
        self._exact, self._halves, self._weighted = options.fixed_rows is None, halves, weight is not None
        self._at_once = not halves and (not self._exact or self._buffers is not None)
        self._rows = options.most_tokens if self._exact and self._at_once else options.fixed_rows
        # The kernel itself makes float8 rows where it stores them in output buffers.
        scaled = ctx.dispatch_scaled if self._buffers is not None and like is x else None
        launch = (ctx.dispatch_plain if scaled is None else scaled).copy()
        self._tokens = GivenTokens(parts, x, quantizes=options.quantized and scaled is None)
        self._launch = launch
        self._first = launchable_after(self._group.runtime, self._tokens.before, launch)
        self._scale_bytes = ctx.scale_bytes if options.quantized else 0
        call = self._call = ffi.cast("ProxycclDispatch *", launch.packed(1))
        self._layout = ffi.addressof(call, "layout")
        call.id_bytes = input_view(self._group, ids, "exp_indices").dtype.itemsize
        call.row_bytes = self._tokens.row_bytes if scaled is None else config.hidden + self._scale_bytes
        self._id_bytes, self._weight_bytes = config.topk * call.id_bytes, config.topk * config.weight.itemsize
        self._outputs = _Outputs(parts, like, float8=options.quantized, weighted=self._weighted)
        self._copies: StreamOperations | None = None

    def repeat(self, x: Any, ids: Any, weight: Any, given: StreamLike) -> Dispatched | None:
        """Makes the whole call. None, and nothing done, if it does not fit."""
        begun = self._begin(x, ids, weight, given)
        if begun is None:
            return None
        desc, taken, owners = begun
        stream = desc.stream
        if not self._at_once:
            self._call.phases = ROUTE | GATHER | TELL
            self._issue(desc, self._first, stream, owners)
            output = self._receive_counted(desc, owners, stream, SEND | RECEIVE, LAYOUT)
        else:
            output = self._receive_at_once(desc, taken, owners)
        if stream is None and self._on_host:
            check_ended(self._parts)
        return output.rows, output.weights, desc

    def send(self, x: Any, ids: Any, weight: Any, given: StreamLike) -> SentDispatch | None:
        """Makes the first half. None, and nothing done, if it does not fit."""
        begun = self._begin(x, ids, weight, given)
        if begun is None:
            return None
        desc, _, owners = begun
        output = None if self._rows is None else self._outputs.make(self._rows)
        self._issue(desc, self._first, desc.stream, owners)
        return SentDispatch(self, desc, output, owners)

    def receive(self, sent: SentDispatch, stream: StreamLike) -> Dispatched:
        """Makes the second half."""
        desc, output, owners = sent.desc, sent.output, sent.owners
        if output is not None:
            self._fill_output(desc, GATHER | RECEIVE, desc.rows, output.addresses)
            self._issue(desc, self._launch, stream, (*owners, output), compared=False)
            desc.mark_received()
        else:
            self._call.phases = GATHER | TELL
            self._issue(desc, self._launch, stream, owners, compared=False)
            output = self._receive_counted(desc, owners, stream, RECEIVE, RECEIVE)
        if stream is None and self._on_host:
            check_ended(self._parts)
        return output.rows, output.weights, desc

    def _begin(
        self, x: Any, ids: Any, weight: Any, given: StreamLike
    ) -> tuple[EPAllToAllLayoutDesc, TakenBuffer, tuple[object, ...]] | None:
        """Fills in a call that sends. Returns its descriptor, the output buffer that it takes, and the arrays that it
        reads; None, and nothing done, if it does not fit.
        """
        config, ctx = self._config, self._ctx
        tokens = self._tokens.count(x)
        if not 0 < tokens <= config.max_tokens:
            return None
        slots, weights_at = (tokens, config.topk), 0
        ids_at = self._at(ids, slots, tokens * self._id_bytes)
        if self._weighted:
            weights_at = self._at(weight, slots, tokens * self._weight_bytes)
        if not ids_at or (self._weighted and not weights_at):
            return None
        like = x[0] if type(x) is tuple else x
        stream = self._stream(like, given)
        if self._exact and not self._halves and self._parts.is_capturing(stream):
            return None
        at, packed = self._tokens.take(x, tokens)
        if not at:
            return None
        taken, buffers = NO_BUFFER, self._buffers
        if buffers is not None:
            on_current = given is None and (self._exact or self._parts.outlives_no_graph(stream))
            taken = buffers.take(like, on_current_stream=on_current)
        number = ctx.next_number()
        desc = EPAllToAllLayoutDesc(
            ctx, number, tokens, like, most_rows=self._rows, counts_rows=not self._exact, output_buffer=taken.number
        )
        desc.stream = stream
        lib.proxyccl_expert_dispatch_send(
            self._call, ROUTE | SEND, number, tokens, at, ids_at, weights_at, taken.number
        )
        desc.fill(self._layout)
        return desc, taken, (x, ids, weight, packed)

    def _receive_at_once(self, desc: EPAllToAllLayoutDesc, taken: TakenBuffer, owners: tuple[object, ...]) -> NewOutput:
        rows, buffers = self._rows, self._buffers
        assert rows is not None
        if buffers is None:
            output = self._outputs.make(rows)
        else:  # the arrays of the rows are made when their number is known
            weights, weights_at = self._outputs.make_weights(rows)
            rows_at = buffers.address(taken.number)
            scales_at = rows_at + buffers.scales_offset if self._scale_bytes else 0
            output = NewOutput(None, weights, (rows_at, scales_at, weights_at))
        phases = ROUTE | SEND | GATHER | RECEIVE | (TELL if self._exact else 0)
        self._fill_output(desc, phases, rows, output.addresses)
        self._issue(desc, self._first, desc.stream, (*owners, output, taken))
        desc.mark_received()
        if buffers is not None:
            if self._exact:
                desc.rows = self._ctx.await_rows(desc)
                refuse_bad(self._parts, desc)
            if taken.whole is not None:
                output.rows = self._outputs.rows_in(taken.whole, buffers.scales_offset, desc.rows)
            else:
                self._copy_passed(desc, output)
            if output.weights is not None and desc.rows != rows:
                output.weights = first_rows(output.weights, desc.rows)
        return output

    def _receive_counted(
        self, desc: EPAllToAllLayoutDesc, owners: tuple[object, ...], stream: StreamLike, phases: int, refused: int
    ) -> NewOutput:
        """Receives rows whose number the CPU awaits, in these phases; in those of `refused` if the ranks refuse it."""
        desc.rows = self._ctx.await_rows(desc)
        bad = learn_counts(self._parts, desc)
        if bad is not None:
            desc.rows, phases = 0, refused
        desc.size_rows(desc.rows)
        desc.fill(self._layout)
        output = _NO_OUTPUT if bad is not None else self._outputs.make(desc.rows)
        self._fill_output(desc, phases, desc.rows, output.addresses)
        self._issue(desc, self._launch, stream, (*owners, output), compared=False)
        desc.mark_received(refused=bad is not None)
        if bad is not None:
            raise bad
        return output

    def _fill_output(self, desc: EPAllToAllLayoutDesc, phases: int, rows: int, addresses: tuple[int, int, int]) -> None:
        received = desc.pointer(RECEIVED) if desc.counts_rows else 0
        scale_bytes = self._scale_bytes if addresses[1] else 0
        lib.proxyccl_expert_dispatch_receive(self._call, phases, rows, scale_bytes, *addresses, received)

    def _copy_passed(self, desc: EPAllToAllLayoutDesc, output: NewOutput) -> None:
        """Copies rows from the buffer that they pass to new arrays."""
        made = output.rows = self._outputs.make_rows(desc.rows)
        if not desc.rows:
            return
        arrays = made if isinstance(made, tuple) else (made,)
        if self._copies is None:
            self._copies = StreamOperations(self._group.runtime, [COPY_LATER] * len(arrays))
        for step, (array, source) in enumerate(zip(arrays, output.addresses, strict=False)):
            self._copies.set_copy(step, CopyBytes(self._ctx.arrays.address(array), source, array.nbytes))
        self._issue(desc, self._copies, desc.stream, arrays, compared=False)


class SentDispatch:
    """A repeated dispatch whose first half is made.

    Attributes:
        desc, stream, output, recorded: as of a `DispatchCall`.
        owners: the arrays that kernels read.
    """

    __slots__ = ("_call", "desc", "output", "owners", "recorded", "stream")

    def __init__(
        self,
        call: RepeatedDispatch,
        desc: EPAllToAllLayoutDesc,
        output: NewOutput | None,
        owners: tuple[object, ...],
    ) -> None:
        self._call, self.desc, self.output, self.owners = call, desc, output, owners
        self.stream: StreamLike = desc.stream
        self.recorded: tuple[Any, ...] = ()

    def receive(self, stream: StreamLike) -> Dispatched:
        """Makes the second half on a stream."""
        return self._call.receive(self, stream)


class RepeatedRouting(RepeatedCall):
    """A dispatch of other values by an earlier dispatch's routing: `EPAll2AllLayer.redispatch`.

    Args:
        parts: of the layer.
        x: the tokens of an earlier call.
    """

    def __init__(self, parts: LayerParts, x: Any) -> None:
        like, is_pair = (x[0], True) if isinstance(x, tuple) else (x, False)
        config = parts.options.config
        super().__init__(parts, like, "redispatch", "uint8" if is_pair else config.token.name)
        self._tokens = GivenTokens(parts, x, quantizes=False)
        launch = parts.ctx.dispatch_plain.copy()
        self._launchable: Launchable = launchable_after(self._group.runtime, self._tokens.before, launch)
        self._scale_bytes = parts.ctx.scale_bytes if is_pair else 0
        call = self._call = ffi.cast("ProxycclDispatch *", launch.packed(1))
        self._layout = ffi.addressof(call, "layout")
        call.redispatch, call.id_bytes, call.row_bytes = 1, 4, self._tokens.row_bytes
        self._own_ids = 4 * parts.ctx.nodes.own * config.max_tokens * config.topk
        self._outputs = _Outputs(parts, like, float8=is_pair, weighted=False)

    def repeat(self, x: Any, desc: EPAllToAllLayoutDesc, given: StreamLike) -> Any:
        """The rows; None, and nothing done, if the call does not fit."""
        tokens = self._tokens.count(x)
        if not tokens or tokens != desc.num_dispatch_token_cur_rank or not desc.rows:
            return None
        at, packed = self._tokens.take(x, tokens)
        if not at:
            return None
        output = self._outputs.make(desc.rows)
        ids_at = desc.pointer("expert_ids") + self._own_ids
        call = self._call
        lib.proxyccl_expert_dispatch_send(call, SEND | RECEIVE, desc.number, tokens, at, ids_at, 0, 0)
        lib.proxyccl_expert_dispatch_receive(call, SEND | RECEIVE, desc.rows, self._scale_bytes, *output.addresses, 0)
        desc.fill(self._layout)
        stream = self._stream(x[0] if type(x) is tuple else x, given)
        self._issue(desc, self._launchable, stream, (x, packed, output))
        return output.rows
