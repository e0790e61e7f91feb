"""Calls of a layer that were made before with arrays like the caller's: their arguments stay packed.

What differs from call to call is filled in and launched by a few calls into C. Everything else was checked, and the
kernel chosen, when the first call of the kind was made, by `DispatchCall` and `CombineCall`. These also make every call
that does not fit: then the methods here return None, having done nothing.
"""

from __future__ import annotations

from typing import Any

from proxyccl.channels.arguments import input_view
from proxyccl.channels.expert_parallel.arrays import first_rows
from proxyccl.channels.expert_parallel.calls import call_name
from proxyccl.channels.expert_parallel.context import (
    GATHER,
    NO_TABLES,
    RECEIVE,
    ROUTE,
    SEND,
    TELL,
    logged_number,
)
from proxyccl.channels.expert_parallel.dispatch_call import check_ended, refuse_bad
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.options import FLOAT8
from proxyccl.channels.expert_parallel.output_buffers import NO_BUFFER
from proxyccl.channels.expert_parallel.parts import LayerParts
from proxyccl.channels.expert_parallel.recording import Dispatched
from proxyccl.channels.expert_parallel.tables import RECEIVED
from proxyccl.channels.launches import CurrentStream
from proxyccl.channels.segment.call_log import encode_fields
from proxyccl.channels.segment.calls import ROOT_FIELD
from proxyccl.device._native import ffi, lib
from proxyccl.device.arrays.libraries import libraries
from proxyccl.device.kernel import Launch
from proxyccl.device.runtime import StreamLike
from proxyccl.device.stream_operations import CopyBytes, StreamOperations

Kinds = tuple[Any, ...]

_COPY_LATER = CopyBytes(1, 2, 1)  # its numbers are set before each call


def _kind(x: Any) -> Any:
    return None if x is None else (type(x), libraries[type(x)].kind(x))


class RepeatedCalls:
    """The calls that one layer has made, on the current streams of the arrays' libraries.

    Args:
        parts: of the layer.
    """

    def __init__(self, parts: LayerParts) -> None:
        self._parts = parts
        self._dispatches: dict[Kinds, _Dispatch] = {}
        self._combines: dict[Kinds, _Combine] = {}

    def dispatch(self, input: Any, exp_indices: Any, weight: Any) -> Dispatched | None:
        """Makes a dispatch like one that `keep_dispatch` was told of. Raises as `EPAll2AllLayer.dispatch`."""
        known = self._dispatches.get((_kind(input), _kind(exp_indices), _kind(weight)))
        return None if known is None else known.repeat(input, exp_indices, weight)

    def keep_dispatch(self, input: Any, exp_indices: Any, weight: Any) -> None:
        """Has `dispatch` repeat calls like one that was made with these arrays, if it can."""
        options = self._parts.options
        kinds = _kind(input), _kind(exp_indices), _kind(weight)
        # The others take more launches, or wait between two.
        exact = options.fixed_rows is None and self._parts.ctx.workspace.outputs is None
        if self._parts.surviving is None and not options.expert_alignment and not exact and _of_one_library(kinds):
            self._dispatches[kinds] = _Dispatch(self._parts, input, exp_indices, weight)

    def combine(self, input: Any, desc: Any, weights: Any, topk_weights: Any, out: Any) -> Any:
        """Makes a combine like one that `keep_combine` was told of. Raises as `EPAll2AllLayer.combine`."""
        known = self._combines.get((_kind(input), _kind(weights), _kind(topk_weights), _kind(out)))
        return None if known is None else known.repeat(input, desc, weights, topk_weights, out)

    def keep_combine(self, input: Any, weights: Any, topk_weights: Any, out: Any) -> None:
        """Has `combine` repeat calls like one that was made with these arrays, if it can."""
        kinds = _kind(input), _kind(weights), _kind(topk_weights), _kind(out)
        # An array of numpy may be read-only, which its kind does not tell.
        if _of_one_library(kinds) and (out is None or libraries[type(out)].is_torch):
            self._combines[kinds] = _Combine(self._parts, input, weights, topk_weights)


def _of_one_library(kinds: Kinds) -> bool:
    known = [kind for kind in kinds if kind is not None]
    return all(kind[0] is known[0][0] and kind[1] is not None for kind in known)


class _Repeated:
    """The common part: where a call is made, and how it is issued."""

    def __init__(self, parts: LayerParts, like: Any) -> None:
        self._parts, self._ctx, self._group = parts, parts.ctx, parts.ctx.group
        library = libraries[type(like)]
        self._memory, self._stream_of, self._is_torch = library.memory, library.stream, library.is_torch
        self._on_host = parts.ctx.runtime_name == "host"

    def _stream(self, x: Any) -> StreamLike:
        """The stream of a call: on a GPU the one where the library of `x` works now."""
        if self._on_host:
            return None
        found = self._stream_of(x)
        return CurrentStream(found) if self._is_torch else found


class _Dispatch(_Repeated):
    """A dispatch, which one kernel makes, after another that makes float8 rows of its tokens if need be."""

    def __init__(self, parts: LayerParts, x: Any, ids: Any, weight: Any) -> None:
        super().__init__(parts, x)
        ctx, options, arrays = parts.ctx, parts.options, parts.ctx.arrays
        config = self._config = options.config
        self._exact = options.fixed_rows is None
        self._rows = options.most_tokens if options.fixed_rows is None else options.fixed_rows
        self._outputs = ctx.workspace.outputs
        scaled = ctx.dispatch_scaled if options.quantized and self._outputs is not None else None
        launch = (ctx.dispatch_plain if scaled is None else scaled).copy()
        call = self._call = ffi.cast("ProxycclDispatch *", launch.packed(1))
        call.phases = ROUTE | SEND | GATHER | RECEIVE | (TELL if self._exact else 0)
        id_bytes = input_view(self._group, ids, "exp_indices").dtype.itemsize
        call.capacity, call.id_bytes = self._rows, id_bytes
        token_bytes = config.token.itemsize
        self._scale_bytes = ctx.scale_bytes if options.quantized else 0
        call.scale_bytes = self._scale_bytes
        call.row_bytes = config.hidden + self._scale_bytes if options.quantized else config.hidden * token_bytes
        self._layout = ffi.addressof(call, "layout")
        name = call_name("dispatch", weights=weight is not None)
        self._fields = encode_fields(ctx.logged(name, config.token.name, 0).encode())
        self._launchable: Launch | StreamOperations = launch
        self._quantizes = options.quantized and scaled is None
        if self._quantizes:
            assert ctx.quantize_launch is not None
            first = ctx.quantize_launch.copy()
            self._quantize_call = ffi.cast("ProxycclCombine *", first.packed(1))
            self._quantize_call.hidden = config.hidden
            self._launchable = StreamOperations(self._group.runtime, [first, launch])
            self._new_packed = arrays.maker(x, "uint8")
        self._row_bytes, self._id_bytes = config.hidden * token_bytes, config.topk * id_bytes
        self._weight_bytes = config.topk * config.weight.itemsize
        leading = parts.leading(self._rows)
        self._shape = (*leading, config.hidden)
        self._scales_shape = (*leading, config.hidden // options.scale_elements)
        self._weights_shape = (*leading, config.topk) if options.by_rank else leading
        self._new_rows = arrays.maker(x, FLOAT8 if options.quantized else config.token)
        self._new_scales, self._new_weights = arrays.maker(x, "float32"), arrays.maker(x, config.weight)
        self._weighted = weight is not None

    def repeat(self, x: Any, ids: Any, weight: Any) -> Dispatched | None:
        """See `RepeatedCalls.dispatch`."""
        config, ctx, parts, memory = self._config, self._ctx, self._parts, self._memory
        shape = x.shape
        tokens = shape[0] if len(shape) == 2 else 0
        slots = (tokens, config.topk)
        if shape != (tokens, config.hidden) or not 0 < tokens <= config.max_tokens or ids.shape != slots:
            return None
        at, ids_at, weights_at = memory(x, tokens * self._row_bytes), memory(ids, tokens * self._id_bytes), 0
        if self._weighted:
            weights_at = memory(weight, tokens * self._weight_bytes) if weight.shape == slots else 0
        if not (at and ids_at) or (self._weighted and not weights_at):
            return None
        stream, taken, outputs = self._stream(x), NO_BUFFER, self._outputs
        if self._exact and parts.is_capturing(stream):
            return None
        if outputs is not None:
            on_current = self._exact or parts.outlives_no_graph(stream)
            taken = outputs.take(x, on_current_stream=on_current)
        number = ctx.next_number()
        desc = EPAllToAllLayoutDesc(
            ctx, number, tokens, x, most_rows=self._rows, counts_rows=not self._exact, output_buffer=taken.number
        )
        address, rows, scales, scales_at = ctx.arrays.address, None, None, 0
        if outputs is not None:  # their arrays are made when the number of rows is known
            rows_at = outputs.address(taken.number)
            if self._scale_bytes:
                scales_at = outputs.scales_address(taken.number)
        else:
            rows = self._new_rows(self._shape)
            rows_at = address(rows)
            if self._scale_bytes:
                scales = self._new_scales(self._scales_shape)
                scales_at = address(scales)
        weights = self._new_weights(self._weights_shape) if self._weighted else None
        if self._quantizes:
            packed = self._new_packed((tokens, config.hidden + self._scale_bytes))
            packed_at = address(packed)
            lib.proxyccl_expert_combine_fill(self._quantize_call, tokens, at, 0, 0, 0, packed_at)
            at = packed_at
        lib.proxyccl_expert_dispatch_fill(
            self._call, number, tokens, at, ids_at, weights_at, rows_at, scales_at,
            0 if weights is None else address(weights), 0 if self._exact else desc.pointer(RECEIVED), taken.number,
        )  # fmt: skip
        desc.fill(self._layout)
        self._fields.fields[ROOT_FIELD] = logged_number(number)
        self._group.launches.issue(self._fields, self._launchable, stream)
        desc.stream = stream
        desc.mark_received()
        if outputs is not None:
            count = self._await_count(desc) if self._exact else self._rows
            made = parts.new_rows(x, count, float8=self._scale_bytes != 0, taken=taken)
            rows, scales = made if self._scale_bytes else (made, None)
            if taken.passed:
                copies = [(address(rows), rows_at, rows.nbytes)]
                if scales is not None:
                    copies.append((address(scales), scales_at, scales.nbytes))
                ctx.copy(copies, stream, (made,))
            if weights is not None and count != self._rows:
                weights = first_rows(weights, count)
        if self._on_host:
            check_ended(parts)
        return (rows, scales) if self._scale_bytes else rows, weights, desc

    def _await_count(self, desc: EPAllToAllLayoutDesc) -> int:
        desc.rows = self._ctx.await_rows(desc)
        refuse_bad(self._parts, desc)
        return desc.rows


class _Combine(_Repeated):
    """A combine, which one kernel makes, after a copy of rows that peers are to load but can't reach where they lie."""

    def __init__(self, parts: LayerParts, x: Any, weights: Any, topk_weights: Any) -> None:
        super().__init__(parts, x)
        ctx, config = parts.ctx, parts.options.config
        self._outputs = None if ctx.workspace.experts.local_combine else ctx.workspace.outputs
        self._launch = ctx.combine_launch(config.token.name).copy()
        call = self._call = ffi.cast("ProxycclCombine *", self._launch.packed(1))
        call.phases, call.hidden = SEND | RECEIVE, config.hidden
        self._layout = ffi.addressof(call, "layout")
        name = call_name("combine", weights=weights is not None)
        self._fields = encode_fields(ctx.logged(name, config.token.name, 0).encode())
        self._after_copy: StreamOperations | None = None
        self._row_bytes, self._hidden, self._topk = config.hidden * config.token.itemsize, config.hidden, config.topk
        self._new = ctx.arrays.maker(x, config.token)
        self._weighted, self._slots_weighted = weights is not None, topk_weights is not None

    def repeat(self, x: Any, desc: Any, weights: Any, topk_weights: Any, out: Any) -> Any:
        """See `RepeatedCalls.combine`."""
        if not isinstance(desc, EPAllToAllLayoutDesc) or not desc.is_received(self._ctx) or not desc.rows:
            return None
        parts, memory, tokens, stream = self._parts, self._memory, desc.num_dispatch_token_cur_rank, self._stream(x)
        leading = parts.leading(desc.rows)
        shape = (tokens, self._hidden)
        if not tokens or desc.stream != stream or x.shape != (*leading, self._hidden):
            return None
        nbytes, weights_at, slots_at = desc.rows * self._row_bytes, 0, 0
        at = memory(x, nbytes)
        if self._weighted:
            weights_at = memory(weights, 4 * desc.rows) if weights.shape == leading else 0
        if self._slots_weighted:
            slots_at = (
                memory(topk_weights, 4 * tokens * self._topk) if topk_weights.shape == (tokens, self._topk) else 0
            )
        target = self._new(shape) if out is None else out
        target_at = memory(target, tokens * self._row_bytes) if target.shape == shape else 0
        if not (at and target_at) or (self._weighted and not weights_at) or (self._slots_weighted and not slots_at):
            return None
        if target_at < at + nbytes and at < target_at + tokens * self._row_bytes:
            return None
        rows_at, buffer = at, 0
        launchable: Launch | StreamOperations = self._launch
        if desc.output_buffer and self._outputs is not None and not self._weighted:
            buffer = self._outputs.number_at(at)
            if not buffer and self._outputs.passing:
                buffer, rows_at = self._outputs.passing, self._outputs.address(self._outputs.passing)
                launchable = self._copying(CopyBytes(rows_at, at, nbytes))
        lib.proxyccl_expert_combine_fill(self._call, tokens, rows_at, buffer, weights_at, slots_at, target_at)
        ffi.memmove(self._layout, NO_TABLES, len(NO_TABLES))
        desc.fill(self._layout)
        self._fields.fields[ROOT_FIELD] = logged_number(desc.number)
        self._group.launches.issue(self._fields, launchable, stream)
        return target

    def _copying(self, copied: CopyBytes) -> StreamOperations:
        if self._after_copy is None:
            self._after_copy = StreamOperations(self._group.runtime, [_COPY_LATER, self._launch])
        self._after_copy.set_copy(0, copied)
        return self._after_copy
