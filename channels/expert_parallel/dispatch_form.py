"""The form of a dispatch, whole or in two halves; and of one by the routing of an earlier dispatch.

C makes whole calls and halves whose number of rows is known (dispatch_form.c), and begins the others, which wait on the
CPU for that number, or whose rows go to output buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from proxyccl.channels.arguments import input_view
from proxyccl.channels.calls._calls import DispatchForm, SentCall
from proxyccl.channels.expert_parallel.arguments import index_array, input_array, output_array
from proxyccl.channels.expert_parallel.arrays import first_rows, part_maker
from proxyccl.channels.expert_parallel.call_form import (
    CallForm,
    GivenTokens,
    Maker,
    address_of,
    in_order,
    name_of,
)
from proxyccl.channels.expert_parallel.context import GATHER, LAYOUT, RECEIVE, ROUTE, SEND, TELL
from proxyccl.channels.expert_parallel.layout import NOT_RECEIVED, EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.options import FLOAT8
from proxyccl.channels.expert_parallel.output_buffers import NO_BUFFER, TakenBuffer
from proxyccl.channels.expert_parallel.parts import LayerParts
from proxyccl.channels.expert_parallel.received import learn_counts, refuse_bad, refuse_capture
from proxyccl.channels.expert_parallel.recording import Dispatched
from proxyccl.channels.expert_parallel.tables import RECEIVED, Tables, number_of
from proxyccl.device._native import ffi
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.arrays.libraries import libraries
from proxyccl.device.errors import ArgumentError, ProxyCCLError
from proxyccl.device.kernel import Launch
from proxyccl.device.runtime import StreamLike
from proxyccl.device.stream_operations import CopyBytes, SetBits, StreamOperations

_NOWHERE = (0, 0, 0)
_WHOLE, _HALVES, _STORED, _COUNTED, _AGAIN = range(5)
"""How C makes the calls of a form; see dispatch_form.c."""
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
        width, dtype: elements of a row, and their type.
        float8: whether rows are in float8, with scales.
        weighted: whether rows have weights.

    Raises:
        ArgumentError: the library can't make them.
    """

    def __init__(
        self, parts: LayerParts, like: Any, width: int, dtype: str, *, float8: bool = False, weighted: bool = False
    ) -> None:
        options, arrays = parts.options, parts.ctx.arrays
        config = options.config
        self._leading, self._arrays, self._address = parts.leading, arrays, arrays.address
        self._elements, self._type = (width,), FLOAT8 if float8 else dtype
        self._scales = (options.scales,) if float8 else None
        self._scale_column = options.scale_column
        self._weights = None if not weighted else (config.topk,) if options.by_rank else ()
        self._weight_type = config.weight
        self._rows_in = part_maker(like, self._elements, self._type)
        self._scales_in = part_maker(like, self._scales or (), "float32")
        self._new_rows = arrays.maker(like, self._type)
        self._new_scales, self._new_weights = arrays.maker(like, "float32"), arrays.maker(like, config.weight)
        if self._scale_column and float8:
            if not libraries[type(like)].is_torch:
                what = f"must be torch's with scales_by_columns, not {type(like).__name__}"
                raise ArgumentError(parts.arguments.tokens, what)
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


class Dispatch(CallForm):
    """A dispatch.

    One launch makes all of it, except where the CPU must know the number of rows before they are received, and in
    halves. Kernels before it may make float8 rows of the tokens, or pack those of the caller, and renumber the ids
    where ranks are lost.

    Args:
        parts: of the layer.
        x, ids, weight, scatter: of the call for which the form is prepared.
        halves: whether calls are made in two halves.
        buffered: whether the rows of a whole call may lie in an output buffer, and not only pass it.
        prepares: whether calls only exchange the routing; see `prepare`.

    Attributes:
        form: makes the calls.

    Raises:
        ArgumentError: an argument is wrong.
    """

    def __init__(
        self,
        parts: LayerParts,
        x: Any,
        ids: Any,
        weight: Any,
        scatter: Any,
        *,
        halves: bool = False,
        buffered: bool = False,
        prepares: bool = False,
    ) -> None:
        options = parts.options
        _check_dispatch(parts, x, ids, weight, scatter)
        arrays = (*x, ids, weight, scatter) if isinstance(x, tuple) else (x, ids, weight, scatter)
        name = name_of("prepare" if prepares else "dispatch", weight, halves=halves, indices=scatter)
        most = 0 if prepares else options.most_of_call
        super().__init__(parts, arrays, name, options.config.token.name, most)
        self._buffers, self._buffered = None if halves else self._ctx.workspace.outputs, buffered
        self._exact = options.fixed_rows is None
        self._at_once = not halves and (not self._exact or self._buffers is not None)
        self._rows = options.most_tokens if self._exact and self._at_once else options.fixed_rows
        self._scale_bytes = self._ctx.scale_bytes if options.quantized else 0
        config = options.config
        self._outputs = _Outputs(
            parts, arrays[0], config.hidden, config.token.name, float8=options.quantized, weighted=weight is not None
        )
        self._copies: StreamOperations | None = None
        # An exact call without output buffers is made by several launches.
        proceed: Callable[..., Any]
        if halves:
            way, proceed = _HALVES, self._receive_sent
        elif prepares:
            way, proceed = _COUNTED, self._prepare
        elif self._buffers is not None:
            way, proceed = _STORED, self._receive_stored
        else:
            way, proceed = (_COUNTED, self._receive_exact) if self._exact else (_WHOLE, _nothing)
        self.form = self._make_form(way, proceed, x, ids, weight, scatter, arrays[0])

    def _make_form(
        self, way: int, proceed: Callable[..., Any], x: Any, ids: Any, weight: Any, scatter: Any, like: Any
    ) -> DispatchForm:
        ctx, options, names = self._ctx, self._parts.options, self._parts.arguments
        config, runtime = options.config, self._group.runtime
        # The kernel itself makes float8 rows where it stores them in output buffers.
        scaled = ctx.dispatch_scaled if self._buffers is not None and like is x else None
        plain = ctx.dispatch_plain if self._buffers is None else ctx.dispatch_stored
        launch = (plain if scaled is None else scaled).copy()
        given_bytes = config.hidden * (config.token.itemsize if like is x else 1)
        tokens = GivenTokens(
            self._parts, is_pair=like is not x, row_bytes=given_bytes, quantizes=options.quantized and scaled is None
        )
        call = ffi.cast("ProxycclDispatch *", launch.packed(1))
        given_ids = index_array(self._group, ids, names.ids, (-1, config.topk)).dtype
        renumber, new_lost, renumbering = self._renumbering(ids, given_ids.itemsize)
        call.id_bytes = given_ids.itemsize if renumber is None else 4
        call.row_bytes = tokens.row_bytes if scaled is None else config.hidden + self._scale_bytes
        call.padded_rows = options.padded_rows
        # Rows that nobody writes must show it: one that the caller's indices leave out, or in a gap.
        cleared = "first_rows" if scatter is not None else "row_slots" if options.expert_alignment else None
        clear = [] if cleared is None else [SetBits(0, 0)]
        before = [each for each in (tokens.before, renumber) if each is not None]
        at_first = self._rows is not None and self._at_once  # else the first launch receives nothing
        first = in_order(runtime, [*before, *(clear if at_first else []), launch])
        second = in_order(runtime, [*([] if at_first else clear), launch])
        clearing, step = first if at_first else second, 0
        if isinstance(clearing, StreamOperations) and clear:
            step = clearing.step_address(len(before) if at_first else 0)
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
            way,
            self.issuer(),
            self.prepared(first),
            self.prepared(second, compared=False),
            (config.topk, options.most_of_call, options.grows and self._exact),
            address_of(call),
            tokens.filled,
            (new_lost, *renumbering),
            (step, number_of(cleared)),
            (phases, ROUTE | SEND, GATHER | RECEIVE),
            (
                EPAllToAllLayoutDesc,
                NOT_RECEIVED,
                ctx,
                ctx.numbers,
                tables,
                self._tables_maker(tables, like),
                tables.address,
            ),
            (-1 if self._rows is None else self._rows, not self._exact, received_offset(tables)),
            (self._scale_bytes, options.scale_column),
            makers,
            self._take,
            proceed,
            places,
        )

    def _renumbering(
        self, ids: Any, id_bytes: int
    ) -> tuple[Launch | None, Callable[[int], Any] | None, tuple[int, int, int, int]]:
        """Where ranks are lost: the kernel that renumbers ids; what makes the array of the slots that lost ranks had;
        and the arguments of the kernel that C fills in (dispatch_form.c).
        """
        surviving = self._parts.surviving
        if surviving is None:
            return None, None, (0, 0, 0, 0)
        launch, new, topk = surviving.launch(id_bytes), self._ctx.arrays.maker(ids, "bool"), surviving.topk
        ids_at, lost_at, slots_at = (address_of(launch.packed(index)) for index in (0, 3, 4))
        return (
            launch,
            lambda tokens: functools.partial(new, (tokens, topk)),
            (ids_at, lost_at, slots_at, surviving.ids.ptr),
        )

    def _tables_maker(self, tables: Tables, like: Any) -> Maker:
        """Makes the array of tables, of int64 where that spares the caller's ids a change of type."""
        arrays = self._ctx.arrays
        if tables.wide & tables.places.keys() and self._library.is_torch:
            return arrays.maker_of(like, (tables.words // 2,), "int64")
        return arrays.maker_of(like, (tables.words,), "int32")

    def _prepare(self, desc: EPAllToAllLayoutDesc, owners: tuple[object, ...]) -> tuple[Any, EPAllToAllLayoutDesc]:
        """Exchanges the routing of tokens, whose rows `Redispatch` sends later. Returns the rows' weights or None, and
        the descriptor.
        """
        stream = desc.stream
        self.form.issue(desc, stream, owners, True, ROUTE | GATHER, 0, _NOWHERE)
        bad = self._learn_rows(desc)
        weights, weights_at = (None, 0) if bad is not None else self._outputs.make_weights(desc.rows)
        self.form.issue(desc, stream, (*owners, weights), False, LAYOUT, desc.rows, (0, 0, weights_at))
        desc.mark_received(refused=bad is not None)
        if bad is not None:
            raise bad
        return weights, desc

    def _receive_exact(self, desc: EPAllToAllLayoutDesc, owners: tuple[object, ...]) -> Dispatched:
        """Counts the rows by one launch, and moves them by another when their number is known."""
        self.form.issue(desc, desc.stream, owners, True, ROUTE | GATHER | TELL, 0, _NOWHERE)
        output = self._receive_counted(desc, owners, desc.stream, SEND | RECEIVE, LAYOUT)
        return output.rows, output.weights, desc

    def _take(self, like: Any, stream: StreamLike, given: StreamLike) -> TakenBuffer:
        """The output buffer of a whole call. Raises ArgumentError on a stream that is being captured, if the call must
        wait.
        """
        if self._exact:
            refuse_capture(self._parts, stream)
        if self._buffers is None:
            return NO_BUFFER
        return self._parts.take_buffer(like, stream, given, buffered=self._buffered)

    def _receive_stored(self, desc: EPAllToAllLayoutDesc, taken: TakenBuffer, weights: Any) -> Dispatched:
        """The results of a call whose one launch moves the rows to an output buffer. In the exact mode the CPU learns
        their number meanwhile.
        """
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

    def _receive_sent(self, sent: SentCall, stream: StreamLike) -> Dispatched:
        """The second half of a call whose number of rows was not known at its first."""
        desc = sent.desc
        self.form.issue(desc, stream, sent.owners, False, GATHER | TELL, 0, _NOWHERE)
        output = self._receive_counted(desc, sent.owners, stream, RECEIVE, RECEIVE)
        return output.rows, output.weights, desc

    def _learn_rows(self, desc: EPAllToAllLayoutDesc) -> ProxyCCLError | None:
        """Awaits the number of rows, and makes room for their tables. Returns the error with which the ranks refuse the
        call, if there is one.
        """
        desc.rows = self._ctx.await_rows(desc)
        bad = learn_counts(self._parts, desc)
        if bad is not None:
            desc.rows = 0
        desc.size_rows(desc.rows)
        return bad

    def _receive_counted(
        self, desc: EPAllToAllLayoutDesc, owners: tuple[object, ...], stream: StreamLike, phases: int, refused: int
    ) -> NewOutput:
        """Receives rows whose number the CPU awaits, in these phases; in those of `refused` if the ranks refuse it:
        rows that were sent must still be received.
        """
        bad = self._learn_rows(desc)
        output = _NO_OUTPUT if bad is not None else self._outputs.make(desc.rows)
        phases = phases if bad is None else refused
        self.form.issue(desc, stream, (*owners, output), False, phases, desc.rows, output.addresses)
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


class Redispatch(CallForm):
    """A dispatch of other values by an earlier dispatch's routing: `EPAll2AllLayer.redispatch`.

    Args:
        parts: of the layer.
        x, desc: of the call for which the form is prepared.
        argument: the name of `x` in errors.
        width: elements of a row; None for those of a token.
        dtype: their type; None for that of tokens.

    Attributes:
        form: makes the calls.

    Raises:
        ArgumentError: an argument is wrong.
    """

    def __init__(
        self,
        parts: LayerParts,
        x: Any,
        desc: EPAllToAllLayoutDesc,
        argument: str,
        *,
        width: int | None = None,
        dtype: str | None = None,
    ) -> None:
        config, ctx, is_pair = parts.options.config, parts.ctx, isinstance(x, tuple)
        tokens = desc.num_dispatch_token_cur_rank
        if width is None:
            parts.given_rows(x, tokens, argument)
        else:
            input_array(ctx.group, x, argument, (tokens, width), str(dtype))
        width, element = width or config.hidden, dtype or config.token.name
        arrays = x if is_pair else (x,)
        super().__init__(parts, arrays, "redispatch", "uint8" if is_pair else element)
        row_bytes = width * as_dtype(FLOAT8 if is_pair else element).itemsize
        given = GivenTokens(parts, is_pair=is_pair, row_bytes=row_bytes, quantizes=False)
        launch = ctx.dispatch_plain.copy()
        call = self._call = ffi.cast("ProxycclDispatch *", launch.packed(1))
        call.redispatch, call.id_bytes, call.row_bytes = 1, 4, given.row_bytes
        call.padded_rows = parts.options.padded_rows
        self._own_ids = 4 * ctx.nodes.own * config.max_tokens * config.topk
        self._element, self._argument = as_dtype(element), argument
        self._outputs = _Outputs(parts, arrays[0], width, element, float8=is_pair)
        before = [] if given.before is None else [given.before]
        first = self.prepared(in_order(self._group.runtime, [*before, launch]))
        tables = ctx.tables.of_call(None, buffered=False, wide_ids=False)
        self.form = DispatchForm(
            _AGAIN,
            self.issuer(),
            first,
            first,
            (config.topk, config.max_tokens, False),
            address_of(call),
            given.filled,
            (None, 0, 0, 0, 0),
            (0, 0),
            (SEND | RECEIVE, 0, 0),
            (EPAllToAllLayoutDesc, NOT_RECEIVED, ctx, ctx.numbers, tables, None, 0),
            (-1, False, 0),
            (ctx.scale_bytes if is_pair else 0, parts.options.scale_column),
            (None, None, None),
            None,
            self._send,
            _NOWHERE,
        )

    def _send(self, desc: EPAllToAllLayoutDesc, stream: StreamLike, out: Any, owners: tuple[Any, ...]) -> Any:
        """Sends the tokens, of which `owners` begins with the array of values. Returns the rows, in `out` if that is
        given.
        """
        output = self._outputs.make(desc.rows) if out is None else self._given_output(owners[0], desc, out)
        self._call.expert_ids = ffi.cast("char *", desc.pointer("expert_ids") + self._own_ids)
        self._call.ticket = desc.number
        self.form.issue(desc, stream, (owners, output), True, SEND | RECEIVE, desc.rows, output.addresses)
        return output.rows

    def _given_output(self, x: Any, desc: EPAllToAllLayoutDesc, out: Any) -> NewOutput:
        source = input_view(self._group, x, self._argument)
        shape = (desc.rows, source.shape[1])
        _, view = output_array(self._group, out, source, shape, self._element, spare_rows=True)
        return NewOutput(out, None, (view.ptr, 0, 0))


def _nothing() -> None:
    """Follows a call that C makes whole."""


def _check_dispatch(parts: LayerParts, x: Any, ids: Any, weight: Any, scatter: Any) -> None:
    """Checks the arrays of a call, and whether the layer takes such a call."""
    options, names, group = parts.options, parts.arguments, parts.ctx.group
    rows, scales = parts.given_rows(x, -1, names.tokens)
    most = options.most_of_call
    if rows.shape[0] > most and not (options.grows and options.fixed_rows is None):
        raise ArgumentError(names.tokens, f"has {rows.shape[0]} tokens; expected at most max_tokens, {most}")
    if options.quantized and scales is None and not options.quantizes:
        raise ArgumentError(names.tokens, f"must be a pair of rows and scales, with {options.scales} scales of a row")
    slots = (rows.shape[0], options.config.topk)
    if options.takes_wide_ids:
        index_array(group, ids, names.ids, slots)
    else:
        input_array(group, ids, names.ids, slots, "int32")
    if weight is not None:
        input_array(group, weight, names.weight, slots, options.config.weight.name)
    if scatter is None:
        return
    if options.layout != "expert":
        raise ArgumentError("full_scatter_indices", f'can\'t be given with layout="{options.layout}"')
    if options.expert_alignment:
        raise ArgumentError("full_scatter_indices", "can't be given with expert_alignment")
    input_array(group, scatter, "full_scatter_indices", (-1, options.config.topk), "int32")


def received_offset(tables: Tables) -> int:
    """Where the number of received rows lies among tables, in bytes; 0 if it does not."""
    return 4 * tables.places[RECEIVED][0] if RECEIVED in tables.places else 0
