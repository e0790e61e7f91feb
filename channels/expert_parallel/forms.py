"""The forms of a layer's calls.

A form is prepared for the kinds of a call's arrays: their types, element types and devices. Every call tries the forms
that there are, each of which does nothing if an array is of another kind. If none fits, the call's arguments are
checked and a form is prepared for them. C then makes the call, as it makes later ones of the form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxyccl.channels.calls._calls import SentCombine, SentDispatch
from proxyccl.channels.expert_parallel.combine_form import NO_SUMS, Combine, Sums
from proxyccl.channels.expert_parallel.dispatch_form import Dispatch, Redispatch
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.parts import LayerParts
from proxyccl.channels.expert_parallel.recording import Dispatched
from proxyccl.device._native import ffi
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.runtime import StreamLike

_MOST_FORMS = 16  # of one call: beyond them the oldest goes
_Form = Callable[..., Any]


class Forms:
    """The forms of one layer.

    Args:
        parts: of the layer.
    """

    def __init__(self, parts: LayerParts) -> None:
        self._parts = parts
        self._dispatches: tuple[list[_Form], list[_Form]] = ([], [])  # whose rows may not, or may, lie in buffers
        self._sends: list[_Form] = []
        self._prepares: list[_Form] = []
        self._redispatches: list[_Form] = []
        self._spreads: list[_Form] = []
        self._combines: tuple[list[_Form], list[_Form]] = ([], [])  # whole, or in halves
        self._collects: list[_Form] = []

    def dispatch(
        self, input: Any, exp_indices: Any, weight: Any, scatter: Any, stream: StreamLike, *, buffered: bool
    ) -> Dispatched:
        """Makes a dispatch. Raises as `EPAll2AllLayer.dispatch`."""
        forms = self._dispatches[buffered]
        for form in forms:
            made: Dispatched | None = form(input, exp_indices, weight, scatter, stream)
            if made is not None:
                return made
        new = Dispatch(self._parts, input, exp_indices, weight, scatter, buffered=buffered)
        dispatched: Dispatched = _add(forms, new.run)(input, exp_indices, weight, scatter, stream)
        return dispatched

    def prepare(
        self, input: Any, exp_indices: Any, weight: Any, stream: StreamLike
    ) -> tuple[Any, EPAllToAllLayoutDesc]:
        """Exchanges the routing of tokens, which `redispatch` sends. Returns their rows' weights, or None, and the
        descriptor. Raises as `DispatchCombine.prepare`.
        """
        for form in self._prepares:
            made: tuple[Any, EPAllToAllLayoutDesc] | None = form(input, exp_indices, weight, stream)
            if made is not None:
                return made
        new = Dispatch(self._parts, input, exp_indices, weight, None, prepares=True)
        prepared: tuple[Any, EPAllToAllLayoutDesc] = _add(self._prepares, new.prepare)(
            input, exp_indices, weight, stream
        )
        return prepared

    def dispatch_send(
        self, input: Any, exp_indices: Any, weight: Any, scatter: Any, stream: StreamLike
    ) -> SentDispatch:
        """Makes the first half of one."""
        for form in self._sends:
            made: SentDispatch | None = form(input, exp_indices, weight, scatter, stream)
            if made is not None:
                return made
        new = Dispatch(self._parts, input, exp_indices, weight, scatter, halves=True)
        sent: SentDispatch = _add(self._sends, new.send)(input, exp_indices, weight, scatter, stream)
        return sent

    def redispatch(self, input: Any, desc: EPAllToAllLayoutDesc, stream: StreamLike, out: Any = None) -> Any:
        """Dispatches other values of the same tokens, to new rows or to `out`."""
        for form in self._redispatches:
            made = form(input, desc, stream, out)
            if made is not None:
                return made
        return _add(self._redispatches, Redispatch(self._parts, input, desc).run)(input, desc, stream, out)

    def spread_weights(self, weights: Any, desc: EPAllToAllLayoutDesc, stream: StreamLike) -> Any:
        """Dispatches float32 [T, topk], all of a token's weights to each of its rows."""
        for form in self._spreads:
            made = form(weights, desc, stream)
            if made is not None:
                return made
        topk = self._parts.options.config.topk
        new = Redispatch(self._parts, weights, desc, width=topk, dtype="float32", argument="topk_weights")
        return _add(self._spreads, new.run)(weights, desc, stream)

    def combine(
        self,
        input: Any,
        desc: Any,
        weights: Any,
        topk_weights: Any,
        out: Any,
        stream: StreamLike,
        sums: Sums = NO_SUMS,
        *,
        halves: bool = False,
    ) -> Any:
        """Makes a combine, or begins it. Raises as `EPAll2AllLayer.combine`.

        Returns:
            The result, or with `halves` a `SentCombine`.
        """
        forms, (added, order_ids) = self._combines[halves], sums
        for form in forms:
            made = form(input, desc, weights, topk_weights, out, stream, order_ids, added)
            if made is not None:
                return made
        own, parts = self._parts.own_desc(desc), self._parts
        new = Combine(parts, "combine", input, own, weights, topk_weights, sums, halves=halves)
        return _add(forms, new.start)(input, desc, weights, topk_weights, out, stream, order_ids, added)

    def combine_send(self, input: Any, desc: Any, weights: Any, topk_weights: Any, stream: StreamLike) -> SentCombine:
        """Makes the first half of one."""
        sent: SentCombine = self.combine(input, desc, weights, topk_weights, None, stream, halves=True)
        return sent

    def collect(self, values: ArrayView, desc: EPAllToAllLayoutDesc, stream: StreamLike) -> Any:
        """Brings each row's value back to the row's slot: [T, topk] of the values' type, zero for slots without a row.
        It is a combine of rows that are zero except in the slot's own column.

        Args:
            values: [R] of the type of tokens or weights; with a row for each rank float32 [R, topk], of which each
                token's are added up.
            desc: of the rows' dispatch.
            stream: where.
        """
        rows = values.owner if self._parts.options.by_rank else self._by_columns(values, desc, stream)
        for form in self._collects:
            made = form(rows, desc, None, None, None, stream, None, ())
            if made is not None:
                return made
        topk, dtype = self._parts.options.config.topk, values.dtype.name
        new = Combine(self._parts, "collect", rows, desc, None, None, width=topk, dtype=dtype)
        return _add(self._collects, new.start)(rows, desc, None, None, None, stream, None, ())

    def _by_columns(self, values: ArrayView, desc: EPAllToAllLayoutDesc, stream: StreamLike) -> Any:
        """[R, topk]: each row's value in the column of the row's slot, beside zeros."""
        ctx, topk, element = self._parts.ctx, self._parts.options.config.topk, values.dtype
        rows = ctx.arrays.new(values.owner, (desc.rows, topk), element)
        if desc.rows:
            kernel = ctx.group.runtime.shipped("experts/spread.h", "expert_spread")
            at = desc.pointer("row_slots"), ctx.arrays.address(rows)
            launch = kernel.prepare(*ctx.grid, values.ptr, *at, desc.rows, topk, element.itemsize)
            ctx.queue(ffi.NULL, launch, stream, desc, (values.owner, rows))
        return rows


def _add(forms: list[_Form], form: _Form) -> _Form:
    if len(forms) == _MOST_FORMS:
        del forms[0]
    forms.append(form)
    return form
