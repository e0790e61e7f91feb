"""Prepares dispatches, whole or in two halves, and redispatches, which use an earlier dispatch's routing.

The C code in dispatch_form.c makes the calls whose number of rows is known. For calls that wait on the CPU for the
number of rows, or whose rows go to output buffers, the C code makes only the first launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxyccl.channels.calls._calls import DispatchForm, SentCall
from proxyccl.channels.expert_parallel.arguments import index_array, input_array, output_array
from proxyccl.channels.expert_parallel.arrays import LibraryArrays, Maker, strides_of
from proxyccl.channels.expert_parallel.call_form import (
    CallForm,
    LayerParts,
    address_of,
    in_order,
    kernel_before,
    name_of,
)
from proxyccl.channels.expert_parallel.context import GATHER, LAYOUT, RECEIVE, ROUTE, SEND, TELL
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.output_buffers import NO_BUFFER, TakenBuffer
from proxyccl.channels.expert_parallel.recording import Dispatched
from proxyccl.channels.expert_parallel.tables import RECEIVED, number_of
from proxyccl.device._native import ffi
from proxyccl.device.arrays.dtypes import DType, as_dtype
from proxyccl.device.errors import ArgumentError
from proxyccl.device.kernel import Launch
from proxyccl.device.runtime import StreamLike
from proxyccl.device.stream_operations import CopyBytes, SetBits, StreamOperations

_NOWHERE = (0, 0, 0)
_WHOLE, _HALVES, _STORED, _COUNTED, _AGAIN = range(5)
"""The modes in which C code makes the calls of a form; dispatch_form.c describes the modes."""
_COPY_LATER = CopyBytes(1, 2, 1)
"""A copy whose addresses and size are set before each call."""


class _Rows:
    """Makes arrays for one part of a result: the rows, their scales or their weights. `tail` is the shape of a row. If
    the array is stored by columns, `column` is the number of elements of a column.
    """

    def __init__(
        self, parts: LayerParts, arrays: LibraryArrays, tail: tuple[int, ...], dtype: DType | str, column: int = 0
    ) -> None:
        self._arrays, self._leading, self._tail, self._type = arrays, parts.leading, tail, arrays.type_of(dtype)
        self._strides = strides_of(parts.leading(1) + tail)
        if column:  # each expert's rows have their own columns
            self._strides = tail[0] * column, 1, column

    def maker(self, rows: int) -> Maker:
        return self._arrays.maker(self._leading(rows) + self._tail, self._strides, self._type)

    def new(self, rows: int) -> tuple[Any, int]:
        array = self.maker(rows)()
        return array, self._arrays.address(array)

    def part(self, array: Any, offset: int, rows: int) -> Any:
        return self._arrays.part(array, offset, self._leading(rows) + self._tail, self._strides, self._type)


class _Outputs:
    """Makes arrays for the results of a layer's calls. A row has `width` elements of `dtype` or, if `scaled`, the
    elements and scales of the layer's dispatch_dtype. Raises ArgumentError if the library can't make such arrays.

    Attributes:
        rows, scales, weights: functions that make the parts of a result; None for parts that a result lacks.
        dtype: the type of a row's elements.
        row_bytes: bytes of a row without its scales.
    """

    def __init__(
        self,
        parts: LayerParts,
        arrays: LibraryArrays,
        width: int,
        dtype: DType,
        scaled: bool,
        weighted: bool = False,
    ) -> None:
        options = parts.options
        if scaled and options.scale_column and not arrays.is_torch:
            what = f"must be torch's with scales_by_columns, not {arrays.kind.__name__}"
            raise ArgumentError(parts.arguments.tokens, what)
        if scaled:
            width, dtype = options.pair_width, as_dtype(options.pair_dtype)
        self.dtype, self.row_bytes = dtype, width * dtype.itemsize
        self.rows = _Rows(parts, arrays, (width,), self.dtype)
        self.scales = _Rows(parts, arrays, (options.scales,), "float32", options.scale_column) if scaled else None
        slots = (options.config.topk,) if options.by_rank else ()
        self.weights = _Rows(parts, arrays, slots, options.config.weight) if weighted else None

    def makers(self, rows: int) -> tuple[Maker | None, ...]:
        return tuple(None if each is None else each.maker(rows) for each in (self.rows, self.scales, self.weights))

    def make(self, rows: int, *, of_rows: bool = True) -> tuple[Any, Any, tuple[int, int, int]]:
        """Returns new arrays for the rows (a pair with scales), new weights or None, and the addresses of rows, scales
        and weights, which are 0 for missing arrays. If `of_rows` is False, makes only the weights.
        """
        values, rows_at = self.rows.new(rows) if of_rows else (None, 0)
        scales, scales_at = self.scales.new(rows) if of_rows and self.scales is not None else (None, 0)
        weights, weights_at = self.weights.new(rows) if self.weights is not None else (None, 0)
        return values if scales is None else (values, scales), weights, (rows_at, scales_at, weights_at)


class Dispatch(CallForm):
    """A form of dispatches.

    A dispatch is one launch, unless it is made in two halves or the CPU must know the number of rows before rows are
    received. Kernels before the dispatch may quantize the tokens, pack the caller's float8 rows, and replace ids by
    places.

    Args:
        x, ids, weight, scatter: the arguments of the first call of the form, which are checked.
        halves: whether calls are made in two halves.
        buffered: whether the rows of a whole call may stay in an output buffer. If False, the rows are copied from the
            output buffer to new arrays.
        prepares: whether calls only exchange the routing, as `DispatchCombine.prepare` does.

    Attributes:
        form: the object that makes the calls in C.
    """

    def __init__(
        self,
        parts: LayerParts,
        x: Any,
        ids: Any,
        weight: Any,
        scatter: Any,
        *_: Any,
        halves: bool = False,
        buffered: bool = False,
        prepares: bool = False,
    ) -> None:
        options = parts.options
        is_pair, id_bytes = _check_dispatch(parts, x, ids, weight, scatter)
        arrays = (*x, ids, weight, scatter) if is_pair else (x, ids, weight, scatter)
        name = name_of("prepare" if prepares else "dispatch", weight, halves=halves, indices=scatter)
        most = 0 if prepares else options.most_of_call
        super().__init__(parts, arrays, name, options.config.token.name, most)
        self._buffers, self._buffered = None if halves else self._ctx.workspace.outputs, buffered
        self._prepares = prepares
        self._exact = options.fixed_rows is None
        self._at_once = not halves and (not self._exact or self._buffers is not None)
        self._rows = options.most_tokens if self._exact and self._at_once else options.fixed_rows
        row, parts_of_rows = (options.config.hidden, options.config.token), (options.quantized, weight is not None)
        self._outputs = _Outputs(parts, self._arrays, *row, *parts_of_rows)
        self._copies: StreamOperations | None = None
        # In the exact mode, a call without output buffers takes several launches.
        proceed: Callable[..., Any]
        if halves:
            way, proceed = _HALVES, self._receive_sent
        elif self._buffers is not None and not prepares:
            way, proceed = _STORED, self._receive_stored
        else:
            way, proceed = _COUNTED if self._exact else _WHOLE, self._receive_exact  # _WHOLE forms don't call `proceed`
        self.form = self._make_form(way, proceed, id_bytes, is_pair=is_pair, scatters=scatter is not None)

    def _make_form(
        self, way: int, proceed: Callable[..., Any], id_bytes: int, *, is_pair: bool, scatters: bool
    ) -> DispatchForm:
        ctx, options, buffers = self._ctx, self._parts.options, self._buffers
        config, runtime = options.config, self._group.runtime
        # If rows go to output buffers, the dispatch kernel itself quantizes them to float8.
        scaled = ctx.dispatch_scaled if buffers is not None and not is_pair else None
        plain = ctx.dispatch_plain if buffers is None else ctx.dispatch_stored
        launch = (plain if scaled is None else scaled).copy()
        quantizes = options.quantized and scaled is None
        packing, filled = kernel_before(self._parts, is_pair=is_pair, quantizes=quantizes)
        replacing, replaced = self._replacing(id_bytes)
        before = [*packing, *replacing]
        call = ffi.cast("ProxycclDispatch *", launch.packed(1))
        call.id_bytes = 4 if replacing else id_bytes
        call.row_bytes = self._outputs.row_bytes + options.scale_bytes
        call.padded_rows = options.padded_rows
        # The table `cleared` is filled first, so that it marks the rows that no rank writes: rows that the caller's
        # indices leave out, and rows in gaps.
        cleared = "first_rows" if scatters else "row_slots" if options.expert_alignment else None
        clear = [] if cleared is None else [SetBits(0, 0)]
        at_first = self._rows is not None and self._at_once  # whether the first launch receives rows
        first = in_order(runtime, [*before, *(clear if at_first else []), launch])
        second = in_order(runtime, [*([] if at_first else clear), launch])
        clearing, step = first if at_first else second, 0
        if isinstance(clearing, StreamOperations) and clear:
            step = clearing.step_address(len(before) if at_first else 0)
        wide_ids = call.id_bytes == ffi.sizeof("uint64_t")
        tables = ctx.tables.of_call(self._rows, buffered=buffers is not None, wide_ids=wide_ids)
        makers: tuple[Maker | None, ...] = (None,) * 3 if self._rows is None else self._outputs.makers(self._rows)
        places = _NOWHERE
        if buffers is not None:  # the rows' arrays are made when the number of rows is known
            makers = (None, None, makers[2])
            places = buffers.address(1), buffers.nbytes, buffers.scales_offset
        phases = ROUTE | SEND | GATHER | RECEIVE | (TELL if self._exact else 0)
        return DispatchForm(
            self.common(first, second),
            way,
            (config.topk, options.most_of_call, options.grows and self._exact),
            address_of(call),
            filled,
            replaced,
            (step, number_of(cleared)),
            (phases, ROUTE | SEND, GATHER | RECEIVE),
            (*self._described(tables), tables.maker(self._arrays), tables.address),
            (-1 if self._rows is None else self._rows, not self._exact, tables.places.get(RECEIVED, (0,))[0]),
            (options.scale_bytes, options.scale_column),
            makers,
            self._take,
            proceed,
            places,
        )

    def _replacing(self, id_bytes: int) -> tuple[list[Launch], tuple[Any, ...]]:
        """Returns a list with the launch of the kernel that replaces ids by places; the list is empty if the ids are
        places. Also returns the values of this kernel's fields in dispatch_form.c.
        """
        places, topk = self._ctx.places, self._parts.options.config.topk
        if places is None:
            return [], (None, 0, 0, 0, 0)
        launch, arrays = places.launch(id_bytes), self._arrays
        truth, filled = arrays.type_of("bool"), (address_of(launch.packed(index)) for index in (0, 3, 4))
        return [launch], (lambda n: arrays.maker((n, topk), (topk, 1), truth), *filled, places.ids.ptr)

    def _receive_exact(self, desc: EPAllToAllLayoutDesc, owners: tuple[object, ...]) -> Dispatched:
        """Counts the rows by one launch, and, when the number is known, moves the rows by another launch. In a
        `prepare`, the second launch only computes the positions of rows, because a redispatch sends the rows later.
        """
        self.form.issue(desc, desc.stream, owners, True, ROUTE | GATHER | TELL, 0, _NOWHERE)
        return self._receive_counted(desc, owners, desc.stream, LAYOUT if self._prepares else SEND | RECEIVE, LAYOUT)

    def _take(self, _x: Any, stream: StreamLike, given: StreamLike) -> TakenBuffer:
        """Returns the output buffer of a whole call on a stream. Peers store the call's rows in the buffer. Raises
        ArgumentError if the call must wait for its number of rows and the stream is being captured. `given` is the
        caller's stream, or None.
        """
        self._parts.refuse_capture(stream)
        if self._buffers is None:
            return NO_BUFFER
        on_current = given is None and (self._exact or self._parts.outlives_no_graph(stream))
        taken = self._buffers.take(self._arrays, self._outputs.dtype, on_current_stream=on_current)
        return taken if self._buffered else TakenBuffer(taken.number, passed=True)

    def _receive_stored(self, desc: EPAllToAllLayoutDesc, taken: TakenBuffer, weights: Any) -> Dispatched:
        """Returns the results of a call whose single launch moves the rows to an output buffer. In the exact mode,
        waits on the CPU for the number of rows.
        """
        buffers, outputs = self._buffers, self._outputs
        assert buffers is not None
        if self._exact:
            desc.rows = self._ctx.await_rows(desc)
            bad = self._parts.learn_counts(desc)
            if bad is not None:
                desc.rows = 0
                desc.mark_received(refused=True)
                raise bad
        if taken.whole is not None:
            rows = outputs.rows.part(taken.whole, 0, desc.rows)
            if outputs.scales is not None:
                rows = rows, outputs.scales.part(taken.whole, buffers.scales_offset, desc.rows)
        else:
            rows = self._copy_passed(desc, taken)
        if outputs.weights is not None and desc.rows != self._rows:
            weights = outputs.weights.part(weights, 0, desc.rows)
        return rows, weights, desc

    def _receive_sent(self, sent: SentCall, stream: StreamLike) -> Dispatched:
        desc = sent.desc
        self.form.issue(desc, stream, sent.owners, False, GATHER | TELL, 0, _NOWHERE)
        return self._receive_counted(desc, sent.owners, stream, RECEIVE, RECEIVE)

    def _receive_counted(
        self, desc: EPAllToAllLayoutDesc, owners: tuple[object, ...], stream: StreamLike, phases: int, refused: int
    ) -> Dispatched:
        """Waits for the number of rows, and then runs the phases that receive the rows. If the ranks refuse the call,
        runs the phases `refused` instead, because rows that were sent must still be received.
        """
        desc.rows = self._ctx.await_rows(desc)
        bad = self._parts.learn_counts(desc)
        rows, weights, addresses = None, None, _NOWHERE
        if bad is not None:
            desc.rows, phases = 0, refused
        desc.size_rows(desc.rows)
        if bad is None:
            rows, weights, addresses = self._outputs.make(desc.rows, of_rows=phases != LAYOUT)
        self.form.issue(desc, stream, (*owners, rows, weights), False, phases, desc.rows, addresses)
        desc.mark_received(refused=bad is not None)
        if bad is not None:
            raise bad
        return rows, weights, desc

    def _copy_passed(self, desc: EPAllToAllLayoutDesc, taken: TakenBuffer) -> Any:
        outputs, buffers = self._outputs, self._buffers
        assert buffers is not None
        made = [each.new(desc.rows) for each in (outputs.rows, outputs.scales) if each is not None]
        arrays = tuple(array for array, _ in made)
        if desc.rows:
            if self._copies is None:
                self._copies = StreamOperations(self._group.runtime, [_COPY_LATER] * len(made))
            source = buffers.address(taken.number)
            sources = source, source + buffers.scales_offset
            for step, ((array, at), source) in enumerate(zip(made, sources, strict=False)):
                self._copies.set_copy(step, CopyBytes(at, source, array.nbytes))
            self._queue(desc, (ffi.NULL, self._copies), desc.stream, arrays)
        return arrays if len(arrays) > 1 else arrays[0]


class Redispatch(CallForm):
    """A form of redispatches (`EPAll2AllLayer.redispatch`), which send other values with the routing of an earlier
    dispatch.

    Args:
        argument: the name of `x` in errors.
        x, desc: the arguments of the first call of the form, which are checked.
        width, dtype: number and type of a row's elements; None for those of a token.

    Attributes:
        form: the object that makes the calls in C.
    """

    def __init__(
        self,
        parts: LayerParts,
        argument: str,
        x: Any,
        desc: EPAllToAllLayoutDesc,
        *_: Any,
        width: int | None = None,
        dtype: str | None = None,
    ) -> None:
        config, ctx, is_pair = parts.options.config, parts.ctx, isinstance(x, tuple)
        tokens = desc.num_dispatch_token_cur_rank
        if width is None:
            parts.given_rows(x, tokens, argument)
        else:
            input_array(ctx.group, x, argument, (tokens, width), str(dtype))
        element = as_dtype(dtype or config.token.name)
        super().__init__(parts, x if is_pair else (x,), "redispatch", "uint8" if is_pair else element.name)
        before, filled = kernel_before(parts, is_pair=is_pair, quantizes=False)
        launch, tables = ctx.dispatch_plain.copy(), ctx.tables.of_call(None, buffered=False, wide_ids=False)
        call = self._call = ffi.cast("ProxycclDispatch *", launch.packed(1))
        self._argument, self._width = argument, width or config.hidden
        scale_bytes = parts.options.scale_bytes if is_pair else 0
        self._outputs = _Outputs(parts, self._arrays, self._width, element, is_pair)
        call.redispatch, call.id_bytes = 1, 4
        call.row_bytes = self._outputs.row_bytes + scale_bytes
        call.padded_rows = parts.options.padded_rows
        self._own_ids = 4 * ctx.nodes.own * config.max_tokens * config.topk
        launches = in_order(self._group.runtime, [*before, launch])
        self.form = DispatchForm(
            self.common(launches, launches),
            _AGAIN,
            (config.topk, config.max_tokens, False),
            address_of(call),
            filled,
            (None, 0, 0, 0, 0),
            (0, 0),
            (SEND | RECEIVE, 0, 0),
            (*self._described(tables), None, 0),
            (-1, False, 0),
            (scale_bytes, parts.options.scale_column),
            (None, None, None),
            None,
            self._send,
            _NOWHERE,
        )

    def _send(self, desc: EPAllToAllLayoutDesc, stream: StreamLike, out: Any, owners: tuple[Any, ...]) -> Any:
        """Sends the values, which are in the array `owners[0]`. Returns the rows, in `out` if it is not None."""
        if out is None:
            rows, _, addresses = self._outputs.make(desc.rows)
        else:
            shape, dtype = (desc.rows, self._width), self._outputs.dtype
            at = output_array(self._group, out, {self._argument: owners[0]}, shape, dtype, spare_rows=True)
            rows, addresses = out, (at, 0, 0)
        self._call.expert_ids = ffi.cast("char *", desc.pointer("expert_ids") + self._own_ids)
        self._call.ticket = desc.number
        self.form.issue(desc, stream, (owners, rows), True, SEND | RECEIVE, desc.rows, addresses)
        return rows


def _check_dispatch(parts: LayerParts, x: Any, ids: Any, weight: Any, scatter: Any) -> tuple[bool, int]:
    """Returns whether `x` is a pair of rows and scales, and the size of an id in bytes."""
    options, names, group = parts.options, parts.arguments, parts.ctx.group
    rows, scales = parts.given_rows(x, -1, names.tokens)
    most = options.most_of_call
    if rows.shape[0] > most and not (options.grows and options.fixed_rows is None):
        raise ArgumentError(names.tokens, f"has {rows.shape[0]} tokens; expected at most max_tokens, {most}")
    if options.quantized and scales is None and not options.quantizes:
        raise ArgumentError(names.tokens, f"must be a pair of rows and scales, with {options.scales} scales of a row")
    slots = (rows.shape[0], options.config.topk)
    if options.minus_one_drops or options.by_rank:
        id_bytes = index_array(group, ids, names.ids, slots).dtype.itemsize
    else:
        id_bytes = input_array(group, ids, names.ids, slots, "int32").dtype.itemsize
    if weight is not None:
        input_array(group, weight, names.weight, slots, options.config.weight.name)
    if scatter is not None:
        if options.layout != "expert":
            raise ArgumentError("full_scatter_indices", f'can\'t be given with layout="{options.layout}"')
        if options.expert_alignment:
            raise ArgumentError("full_scatter_indices", "can't be given with expert_alignment")
        input_array(group, scatter, "full_scatter_indices", (-1, options.config.topk), "int32")
    return scales is not None, id_bytes
