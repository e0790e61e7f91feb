"""A dispatch like one that was made before, whole or in two halves; and one by the routing of an earlier dispatch.

C makes whole calls and halves whose number of rows is known (repeated_dispatch.c), and begins the others, which wait
on the CPU for that number, or whose rows go to output buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from proxyccl.channels._prepared_calls import DispatchForm, SentDispatch
from proxyccl.channels.arguments import input_view
from proxyccl.channels.expert_parallel.arrays import first_rows, part_maker
from proxyccl.channels.expert_parallel.context import GATHER, LAYOUT, RECEIVE, ROUTE, SEND, TELL
from proxyccl.channels.expert_parallel.dispatch_call import check_waited, learn_counts, refuse_bad
from proxyccl.channels.expert_parallel.layout import NOT_RECEIVED, EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.options import FLOAT8
from proxyccl.channels.expert_parallel.output_buffers import NO_BUFFER, TakenBuffer
from proxyccl.channels.expert_parallel.parts import LayerParts
from proxyccl.channels.expert_parallel.recording import Dispatched
from proxyccl.channels.expert_parallel.repeated_call import (
    GivenTokens,
    Maker,
    RepeatedCall,
    address_of,
    describe_kind,
    launchable_after,
    name_of,
)
from proxyccl.channels.expert_parallel.tables import RECEIVED, Tables
from proxyccl.device._native import ffi
from proxyccl.device.runtime import StreamLike
from proxyccl.device.stream_operations import CopyBytes, StreamOperations

_NOWHERE = (0, 0, 0)
_COPY_LATER = CopyBytes(1, 2, 1)
"""A copy whose numbers are set before each call."""


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


_NO_OUTPUT = NewOutput(None, None, _NOWHERE)


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
        self._leading, self._arrays, self._address = parts.leading, arrays, arrays.address
        self._elements, self._type = (config.hidden,), FLOAT8 if float8 else config.token
        self._scales = (options.scales,) if float8 else None
        self._scale_column = options.scale_column
        self._weights = None if not weighted else (config.topk,) if options.by_rank else ()
        self._weight_type = config.weight
        self._rows_in = part_maker(like, self._elements, self._type)
        self._scales_in = part_maker(like, self._scales or (), "float32")
        self._new_rows = arrays.maker(like, self._type)
        self._new_scales, self._new_weights = arrays.maker(like, "float32"), arrays.maker(like, config.weight)
        if self._scale_column and float8:
            shape = self._leading(options.fixed_rows or 0) + (self._scales or ())
            columns = arrays.columns_maker(like, shape, self._scale_column)
            self._new_scales = lambda _: columns()

    def makers(self, like: Any, rows: int) -> tuple[Maker | None, ...]:
        """Functions that make the rows, their scales and the weights, of this many rows; None if there are none."""
        leading, new = self._leading(rows), self._arrays.maker_of
        scales: Maker | None = None
        if self._scales is not None:
            shape = leading + self._scales
            column = self._scale_column
            scales = self._arrays.columns_maker(like, shape, column) if column else new(like, shape, "float32")
        weights = None if self._weights is None else new(like, leading + self._weights, self._weight_type)
        return new(like, leading + self._elements, self._type), scales, weights

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
        buffered: whether the rows of a whole call may lie in an output buffer, and not only pass it.

    Attributes:
        repeat: makes a whole call. None, and nothing done, if it does not fit.
        send: the same for the first half of one.
    """

    def __init__(self, parts: LayerParts, x: Any, ids: Any, weight: Any, *, halves: bool, buffered: bool) -> None:
        like = x[0] if isinstance(x, tuple) else x
        ctx, options = parts.ctx, parts.options
        name = name_of("dispatch", weight, halves=halves)
        super().__init__(parts, like, name, options.config.token.name, options.most_of_call)
        self._buffers, self._buffered = None if halves else ctx.workspace.outputs, buffered
        self._exact, self._halves = options.fixed_rows is None, halves
        self._at_once = not halves and (not self._exact or self._buffers is not None)
        self._rows = options.most_tokens if self._exact and self._at_once else options.fixed_rows
        self._scale_bytes = ctx.scale_bytes if options.quantized else 0
        self._outputs = _Outputs(parts, like, float8=options.quantized, weighted=weight is not None)
        self._copies: StreamOperations | None = None
        self._form = self._make_form(x, ids, weight, like)
        known = self._rows is not None and not (self._exact or self._buffers is not None)
        self._in_one = self._form.repeat if known else None
        self.send = self._form.send
        self.repeat: Callable[[Any, Any, Any, StreamLike], Dispatched | None] = self._repeat
        if self._in_one is not None and not self._on_host:
            self.repeat = self._in_one

    def _make_form(self, x: Any, ids: Any, weight: Any, like: Any) -> DispatchForm:
        ctx, options = self._ctx, self._parts.options
        config = options.config
        # The kernel itself makes float8 rows where it stores them in output buffers.
        scaled = ctx.dispatch_scaled if self._buffers is not None and like is x else None
        plain = ctx.dispatch_plain if self._buffers is None else ctx.dispatch_stored
        launch = (plain if scaled is None else scaled).copy()
        tokens = GivenTokens(self._parts, x, quantizes=options.quantized and scaled is None)
        first = launchable_after(self._group.runtime, tokens.before, launch)
        call = ffi.cast("ProxycclDispatch *", launch.packed(1))
        call.id_bytes = input_view(self._group, ids, "exp_indices").dtype.itemsize
        call.row_bytes = tokens.row_bytes if scaled is None else config.hidden + self._scale_bytes
        call.padded_rows = options.padded_rows
        weight_bytes = config.topk * config.weight.itemsize
        tables = ctx.tables.of_call(
            self._rows, buffered=self._buffers is not None, wide_ids=call.id_bytes == ffi.sizeof("uint64_t")
        )
        makers: tuple[Maker | None, ...] = (None, None, None)
        places, buffers = _NOWHERE, self._buffers
        if self._rows is not None:
            makers = self._outputs.makers(like, self._rows)
        if buffers is not None:  # the arrays of the rows are made when their number is known
            makers = (None, None, makers[2])
            places = buffers.address(1), buffers.nbytes, buffers.scales_offset
        phases = ROUTE | SEND | GATHER | RECEIVE | (TELL if self._exact else 0)
        return DispatchForm(
            self.issuer(),
            self.prepared(first),
            self.prepared(launch, compared=False),
            (*tokens.kinds, describe_kind(ids), describe_kind(weight)),
            (
                config.hidden,
                tokens.scales,
                config.topk,
                options.most_of_call,
                tokens.given_bytes,
                config.topk * call.id_bytes,
                weight_bytes,
            ),
            address_of(call),
            tokens.filled,
            (phases, ROUTE | SEND, GATHER | RECEIVE),
            (
                EPAllToAllLayoutDesc,
                NOT_RECEIVED,
                ctx,
                ctx.numbers,
                tables,
                self._tables_maker(tables, like),
                tables.address,
                ctx.arrays.address,
            ),
            (-1 if self._rows is None else self._rows, not self._exact, received_offset(tables)),
            (self._scale_bytes, options.scale_column),
            makers,
            self._take,
            self._receive_sent,
            places,
        )

    def _tables_maker(self, tables: Tables, like: Any) -> Maker:
        """Makes the array of tables, of int64 where that spares the caller's ids a change of type."""
        arrays = self._ctx.arrays
        if tables.wide & tables.places.keys() and self._library.is_torch:
            return arrays.maker_of(like, (tables.words // 2,), "int64")
        return arrays.maker_of(like, (tables.words,), "int32")

    def _repeat(self, x: Any, ids: Any, weight: Any, given: StreamLike) -> Dispatched | None:
        made: Dispatched | None
        if self._in_one is not None:
            made = self._in_one(x, ids, weight, given)
        else:
            made = self._store(x, ids, weight, given) if self._at_once else self._count(x, ids, weight, given)
        if made is not None:
            check_waited(self._parts, given)
        return made

    def _count(self, x: Any, ids: Any, weight: Any, given: StreamLike) -> Dispatched | None:
        """Counts the rows by one launch, and moves them by another when their number is known."""
        desc = self._form.begin(x, ids, weight, given)
        if desc is None:
            return None
        stream, owners = desc.stream, (x, ids, weight)
        self._form.issue(desc, stream, owners, True, ROUTE | GATHER | TELL, 0, _NOWHERE)
        output = self._receive_counted(desc, owners, stream, SEND | RECEIVE, LAYOUT)
        return output.rows, output.weights, desc

    def _take(self, like: Any, stream: StreamLike, given: StreamLike) -> TakenBuffer | None:
        """The output buffer of a call; None if it can't be made on a stream that is being captured."""
        if self._exact and not self._halves and self._parts.is_capturing(stream):
            return None
        if self._buffers is None:
            return NO_BUFFER
        return self._parts.take_buffer(like, stream, given, buffered=self._buffered)

    def _store(self, x: Any, ids: Any, weight: Any, given: StreamLike) -> Dispatched | None:
        """Moves the rows to an output buffer by one launch. In the exact mode the CPU learns their number meanwhile."""
        stored = self._form.store(x, ids, weight, given)
        if stored is None:
            return None
        desc, taken, weights = stored
        buffers, most = self._buffers, self._rows
        assert buffers is not None
        if self._exact:
            desc.rows = self._ctx.await_rows(desc)
            refuse_bad(self._parts, desc)
        if taken.whole is not None:
            rows = self._outputs.rows_in(taken.whole, buffers.scales_offset, desc.rows)
        else:
            rows = self._copy_passed(desc, taken)
        if weights is not None and desc.rows != most:
            weights = first_rows(weights, desc.rows)
        return rows, weights, desc

    def _receive_sent(self, sent: SentDispatch, stream: StreamLike) -> Dispatched:
        """The second half of a call whose number of rows was not known at its first."""
        desc = sent.desc
        self._form.issue(desc, stream, sent.owners, False, GATHER | TELL, 0, _NOWHERE)
        output = self._receive_counted(desc, sent.owners, stream, RECEIVE, RECEIVE)
        return output.rows, output.weights, desc

    def _receive_counted(
        self, desc: EPAllToAllLayoutDesc, owners: tuple[object, ...], stream: StreamLike, phases: int, refused: int
    ) -> NewOutput:
        """Receives rows whose number the CPU awaits, in these phases; in those of `refused` if the ranks refuse it."""
        desc.rows = self._ctx.await_rows(desc)
        bad = learn_counts(self._parts, desc)
        if bad is not None:
            desc.rows, phases = 0, refused
        desc.size_rows(desc.rows)
        output = _NO_OUTPUT if bad is not None else self._outputs.make(desc.rows)
        self._form.issue(desc, stream, (*owners, output), False, phases, desc.rows, output.addresses)
        desc.mark_received(refused=bad is not None)
        if bad is not None:
            raise bad
        return output

    def _copy_passed(self, desc: EPAllToAllLayoutDesc, taken: TakenBuffer) -> Any:
        """Copies rows from the buffer that they pass to new arrays."""
        made, buffers = self._outputs.make_rows(desc.rows), self._buffers
        assert buffers is not None
        if not desc.rows:
            return made
        arrays = made if isinstance(made, tuple) else (made,)
        if self._copies is None:
            self._copies = StreamOperations(self._group.runtime, [_COPY_LATER] * len(arrays))
        sources = buffers.address(taken.number), buffers.scales_address(taken.number)
        for step, (array, source) in enumerate(zip(arrays, sources, strict=False)):
            self._copies.set_copy(step, CopyBytes(self._ctx.arrays.address(array), source, array.nbytes))
        self._queue(desc, (ffi.NULL, self._copies), desc.stream, arrays)
        return made


class RepeatedRouting(RepeatedCall):
    """A dispatch of other values by an earlier dispatch's routing: `EPAll2AllLayer.redispatch`.

    Args:
        parts: of the layer.
        x: the tokens of an earlier call.
    """

    def __init__(self, parts: LayerParts, x: Any) -> None:
        like, is_pair = (x[0], True) if isinstance(x, tuple) else (x, False)
        ctx, config = parts.ctx, parts.options.config
        super().__init__(parts, like, "redispatch", "uint8" if is_pair else config.token.name)
        tokens = GivenTokens(parts, x, quantizes=False)
        launch = ctx.dispatch_plain.copy()
        call = self._call = ffi.cast("ProxycclDispatch *", launch.packed(1))
        call.redispatch, call.id_bytes, call.row_bytes = 1, 4, tokens.row_bytes
        call.padded_rows = parts.options.padded_rows
        self._own_ids = 4 * ctx.nodes.own * config.max_tokens * config.topk
        self._outputs = _Outputs(parts, like, float8=is_pair, weighted=False)
        first = self.prepared(launchable_after(self._group.runtime, tokens.before, launch))
        tables = ctx.tables.of_call(None, buffered=False, wide_ids=False)
        self._form = DispatchForm(
            self.issuer(),
            first,
            first,
            (*tokens.kinds, None, None),
            (config.hidden, tokens.scales, config.topk, parts.options.most_of_call, tokens.given_bytes, 0, 0),
            address_of(call),
            tokens.filled,
            (SEND | RECEIVE, 0, 0),
            (EPAllToAllLayoutDesc, NOT_RECEIVED, ctx, ctx.numbers, tables, None, 0, ctx.arrays.address),
            (-1, False, 0),
            (ctx.scale_bytes if is_pair else 0, parts.options.scale_column),
            (None, None, None),
            None,
            None,
            _NOWHERE,
        )

    def repeat(self, x: Any, desc: EPAllToAllLayoutDesc, given: StreamLike) -> Any:
        """The rows; None, and nothing done, if the call does not fit."""
        tokens = desc.num_dispatch_token_cur_rank
        if tokens == 0 or not desc.rows or self._form.fill(x) != tokens:  # `fill` returns 0 for what does not fit
            return None
        output = self._outputs.make(desc.rows)
        self._call.expert_ids = ffi.cast("char *", desc.pointer("expert_ids") + self._own_ids)
        self._call.ticket = desc.number
        stream = self._form.stream(x[0] if type(x) is tuple else x, given)
        self._form.issue(desc, stream, (x, output), True, SEND | RECEIVE, desc.rows, output.addresses)
        return output.rows


def received_offset(tables: Tables) -> int:
    """Where the number of received rows lies among tables, in bytes; 0 if it does not."""
    return 4 * tables.places[RECEIVED][0] if RECEIVED in tables.places else 0
