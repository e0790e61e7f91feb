"""The form of a combine, whole or in two halves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from proxyccl.channels.arguments import input_view
from proxyccl.channels.calls._calls import CombineForm
from proxyccl.channels.expert_parallel.arguments import index_array, input_array, output_array
from proxyccl.channels.expert_parallel.call_form import CallForm, Check, Maker, address_of, check_of, kind_of, name_of
from proxyccl.channels.expert_parallel.config import MOST_ADDED
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.parts import LayerParts
from proxyccl.device._native import ffi
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.errors import ArgumentError
from proxyccl.device.stream_operations import CopyBytes, StreamOperations


class Sums(NamedTuple):
    """How sums begin, and their order: `added` and `order_ids` of `EPAll2AllLayer.combine`."""

    added: tuple[Any, ...] = ()
    order_ids: Any = None


NO_SUMS = Sums()


class Combine(CallForm):
    """A combine, which one kernel makes, after a copy of rows that peers are to load but can't reach where they lie. C
    makes it (combine_form.c).

    Args:
        parts: of the layer.
        call: "combine", or "collect" for rows of other elements, which are neither padded nor loaded.
        x, desc, weights, topk_weights, sums: of the call for which the form is prepared.
        halves: whether calls are made in two halves.
        width: elements of a row; None for those of a token.
        dtype: their type; None for that of tokens.

    Attributes:
        start: makes a call or, of a call in halves, the first half; see `CombineForm`.

    Raises:
        ArgumentError: an argument is wrong.
    """

    def __init__(
        self,
        parts: LayerParts,
        call: str,
        x: Any,
        desc: EPAllToAllLayoutDesc,
        weights: Any,
        topk_weights: Any,
        sums: Sums = NO_SUMS,
        *,
        halves: bool = False,
        width: int | None = None,
        dtype: str | None = None,
    ) -> None:
        config, ctx = parts.options.config, parts.ctx
        self._parts, self._group = parts, ctx.group
        self._width, self._token = width or config.hidden, as_dtype(dtype or config.token.name)
        of_tokens = call == "combine"
        self._check_rows = self._rows_check(parts.arguments.rows)
        id_bytes = self._check(x, desc, weights, topk_weights, sums, parts.leading(desc.rows) if of_tokens else None)
        arrays = (x, weights, topk_weights, sums.order_ids, *sums.added)
        super().__init__(parts, arrays, name_of(call, weights, halves=halves), self._token.name)
        # Peers load rows only in a call that is made at once and without weights of rows.
        loads = of_tokens and not halves and weights is None and not ctx.workspace.experts.local_combine
        buffers = ctx.workspace.outputs if loads else None
        launch = ctx.combine_launch(self._token.name).copy()
        filled = ffi.cast("ProxycclCombine *", launch.packed(1))
        filled.hidden, filled.id_bytes = self._width, id_bytes
        passing = buffers.passing if buffers is not None else 0
        passing_at, after_copy, step = 0, None, 0
        if buffers is not None and passing:
            passing_at = buffers.address(passing)
            copied = StreamOperations(self._group.runtime, [CopyBytes(1, 2, 1), launch])
            after_copy, step = self.prepared(copied), copied.step_address(0)
        padded = parts.options.padded_rows if of_tokens else 0
        row_bytes = self._width * self._token.itemsize
        ids_type = f"int{8 * id_bytes}"
        added = [self.kind(each, "added", self._token.name) for each in (*sums.added, None, None)][:MOST_ADDED]
        form = CombineForm(
            self.issuer(),
            self.prepared(launch),
            self.prepared(launch, compared=False),
            after_copy,
            (
                kind_of(self._group, x, self._check_rows),
                self.kind(weights, "weights", "float32"),
                self.kind(topk_weights, "topk_weights", "float32"),
                self.kind(sums.order_ids, "order_ids", ids_type),
                *added,
            ),
            (
                self._width,
                config.topk,
                row_bytes,
                config.num_experts_per_rank if padded else 0,
                padded,
                len(sums.added),
            ),
            halves,
            address_of(filled),
            (None if buffers is None else buffers.numbers, passing, passing_at, step),
            ctx,
            (self._output_maker(x), ctx.arrays.address),
            (parts.own_desc, self._check_output),
        )
        self.start = form.start

    def _rows_check(self, argument: str) -> Check:
        """The check of rows, of which there may be more than the descriptor's where the flow ignores them."""
        group, dtype = self._group, self._token.name
        if not self._parts.arguments.spare_rows:
            return check_of(group, argument, dtype)

        def check(x: Any, shape: tuple[int, ...]) -> tuple[int, int]:
            view = input_array(group, x, argument, (-1, *shape[1:]), dtype)
            if view.shape[0] < shape[0]:
                raise ArgumentError(argument, f"has {view.shape[0]} rows; expected at least {shape[0]}")
            return view.ptr, view.shape[0]

        return check

    def _check(
        self,
        x: Any,
        desc: EPAllToAllLayoutDesc,
        weights: Any,
        topk_weights: Any,
        sums: Sums,
        leading: tuple[int, ...] | None,
    ) -> int:
        """Checks the arrays of a call. Returns the bytes of each of `order_ids`."""
        parts, group = self._parts, self._group
        leading = leading or (desc.rows,)
        slots = (desc.num_dispatch_token_cur_rank, parts.options.config.topk)
        self._check_rows(x, (*leading, self._width))
        if weights is not None:
            input_array(group, weights, "weights", leading, "float32")
        if topk_weights is not None:
            if not parts.sums_on_own_node:
                raise ArgumentError("topk_weights", "needs one node whose ranks reach each other, and no local combine")
            input_array(group, topk_weights, "topk_weights", slots, "float32")
        self._check_added(sums.added, (desc.num_dispatch_token_cur_rank, self._width))
        if sums.order_ids is None:
            return 0
        if not parts.sums_ranks_in_turn:
            raise ArgumentError("order_ids", "needs one node, and a row or a sum of each rank")
        return index_array(group, sums.order_ids, "order_ids", slots).dtype.itemsize

    def _check_added(self, added: Sequence[Any], shape: tuple[int, int]) -> None:
        if len(added) > MOST_ADDED:
            raise ArgumentError("added", f"are {len(added)} arrays; expected at most {MOST_ADDED}")
        for each in added:
            input_array(self._group, each, "added", shape, self._token.name)

    def _output_maker(self, x: Any) -> Callable[[int], Maker]:
        """Returns a function that returns the maker of results for a number of tokens. It does not keep `x`."""
        arrays, token, width = self._ctx.arrays, self._token, self._width
        like = arrays.new(x, (1,), token)
        return lambda tokens: arrays.maker_of(like, (tokens, width), token)

    def _check_output(self, x: Any, desc: EPAllToAllLayoutDesc, out: Any) -> tuple[Any, int]:
        """The caller's array for the result, and its address. Raises ArgumentError if it does not fit."""
        shape = (desc.num_dispatch_token_cur_rank, self._width)
        target, view = output_array(self._group, out, input_view(self._group, x, "input"), shape, self._token)
        return target, view.ptr
