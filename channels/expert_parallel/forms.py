"""The calls of a layer. Each kind of call is a list of forms (prepared calls); calls/form_list.c searches the list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxyccl.channels.arguments import readable_view
from proxyccl.channels.calls._calls import FormList
from proxyccl.channels.expert_parallel.call_form import LayerParts
from proxyccl.channels.expert_parallel.combine_form import Combine, Signals
from proxyccl.channels.expert_parallel.config import MOST_ADDED
from proxyccl.channels.expert_parallel.dispatch_form import Dispatch, Redispatch
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.device._native import ffi
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.runtime import StreamLike


class Forms:
    """The lists of forms of one layer. Calling a list makes a call; the arguments are those of the list's `prepare`.

    Attributes:
        dispatches: two lists: dispatches whose rows are copied from an output buffer, and dispatches whose rows may
            stay in the buffer.
        sends: first halves of dispatches.
        prepares: dispatches that exchange only the routing.
        redispatches: dispatches of other values of the same tokens, to new rows or to `out`.
        spreads: redispatches of weights, float32 [T, topk]; each row gets all weights of its token.
        combines: whole combines.
        returns: first halves of combines.
        signals, signalled_returns: the counters of combines whose rows another kernel still computes, and these
            combines' first halves.
    """

    def __init__(self, parts: LayerParts) -> None:
        self._parts = parts
        names, topk = parts.arguments, parts.options.config.topk
        inputs = ((names.tokens, -2), (names.ids, 1), (names.weight, 1), ("full_scatter_indices", 1))
        rows = ((names.rows, 1), ("weights", 1), ("topk_weights", 1), ("order_ids", 1), ("added", MOST_ADDED))

        def dispatches(**options: bool) -> FormList:
            return _list(parts, inputs, 1, lambda *given: Dispatch(parts, *given, **options).form)

        def redispatches(argument: str, **options: Any) -> FormList:
            return _list(
                parts, ((argument, -2),), 3, lambda *given: Redispatch(parts, argument, *given, **options).form
            )

        def combines(call: str, *, halves: bool = False, signals: Signals | None = None) -> FormList:
            return _list(parts, rows, 3, lambda *given: Combine(parts, call, halves, signals, *given).form)

        self.dispatches = dispatches(buffered=False), dispatches(buffered=True)
        self.sends, self.prepares = dispatches(halves=True), dispatches(prepares=True)
        self.redispatches = redispatches(names.values)
        self.spreads = redispatches("topk_weights", width=topk, dtype="float32")
        self.combines, self.returns = combines("combine"), combines("combine", halves=True)
        self.signals = Signals()
        self.signalled_returns = combines("combine", halves=True, signals=self.signals)
        self._collects = combines("collect")

    def collect(self, values: ArrayView, desc: EPAllToAllLayoutDesc, stream: StreamLike) -> Any:
        """Sends each row's value to the row's slot, and returns [T, topk] of the values' type, zero for slots without a
        row. The implementation combines a matrix whose rows are zero except in the column of the row's slot. Values are
        [R], of the type of tokens or weights. But if each rank gets one row of a token, values are float32 [R, topk],
        and a token's rows are summed.
        """
        rows = values.owner if self._parts.options.by_rank else self._by_columns(values, desc, stream)
        return self._collects.call(rows, None, None, None, (), desc, None, stream)

    def _by_columns(self, values: ArrayView, desc: EPAllToAllLayoutDesc, stream: StreamLike) -> Any:
        ctx, topk, element = self._parts.ctx, self._parts.options.config.topk, values.dtype
        arrays = ctx.arrays.like(values.owner)
        rows = arrays.maker((desc.rows, topk), (topk, 1), arrays.type_of(element))()
        if desc.rows:
            kernel = ctx.group.runtime.shipped("experts/spread.h", "expert_spread")
            at = desc.pointer("row_slots"), arrays.address(rows)
            launch = kernel.prepare(*ctx.grid, values.ptr, *at, desc.rows, topk, element.itemsize)
            ctx.queue(ffi.NULL, launch, stream, desc, (values.owner, rows))
        return rows


def _list(
    parts: LayerParts, arguments: tuple[tuple[str, int], ...], further: int, prepare: Callable[..., Any]
) -> FormList:
    """See `FormList`. `arguments` has the name and the width of each array argument."""

    def view(argument: int, x: Any) -> ArrayView:
        return readable_view(parts.ctx.group, x, arguments[argument][0])

    calls = parts.ctx.group.launches.calls
    return FormList(calls, tuple(width for _, width in arguments), further, view, prepare)
