"""Prepares combines, whole or in two halves, for C (combine_form.c)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from proxyccl.channels.arguments import input_view
from proxyccl.channels.calls._calls import CombineForm
from proxyccl.channels.expert_parallel.arguments import OVERLAPS, index_array, input_array, output_array
from proxyccl.channels.expert_parallel.call_form import CallForm, LayerParts, address_of, name_of
from proxyccl.channels.expert_parallel.config import MOST_ADDED
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.device._native import ffi
from proxyccl.device.errors import ArgumentError
from proxyccl.device.kernel import Launch
from proxyccl.device.stream_operations import CopyBytes, StreamOperations


class RowSignals(NamedTuple):
    """Counters by which another kernel shows which padded rows it has computed."""

    counters: int  # the address of the counters, 32-bit integers [experts of this rank, blocks of an expert]
    blocks: int  # the number of blocks of an expert
    block_rows: int  # the number of rows of a block
    threshold: int  # the block's rows are complete when its counter has reached this value
    senders: int  # the most thread blocks that send rows; 0 for as many as the layer has
    owner: Any  # the array of the counters; the layer keeps the array until its next combine with counters


class Signals:
    """The counters of the next combine whose rows another kernel still computes, and the launches of such combines,
    which have the counters in their arguments.
    """

    def __init__(self) -> None:
        self._launches: list[Launch] = []
        self._values: tuple[int, ...] = ()
        self._owner: Any = None

    def set(self, after: RowSignals, expert_rows: int, most_senders: int) -> None:
        """Sets the counters of the next combine.

        Args:
            after: the counters.
            expert_rows: the number of rows for which an expert has room.
            most_senders: the number of the layer's thread blocks.
        """
        self._owner = after.owner
        senders = min(after.senders or most_senders, most_senders)
        self._values = (after.counters, expert_rows, after.blocks, after.block_rows, after.threshold, senders)
        for launch in self._launches:
            self._fill(launch)

    def add(self, launch: Launch) -> None:
        self._launches.append(launch)
        self._fill(launch)

    def _fill(self, launch: Launch) -> None:
        filled = ffi.cast("ProxycclCombine *", launch.packed(1))
        at, filled.expert_rows, filled.expert_blocks, filled.block_rows, filled.threshold, filled.senders = self._values
        filled.signals = ffi.cast("uint32_t *", at)


class Combine(CallForm):
    """A form of combines. Each combine is one kernel. If peers load the rows, but can't access the memory that holds
    the rows, the rows are first copied to an output buffer.

    Args:
        call: "combine"; or "collect" if each row has one element of any type for each slot, and rows are neither padded
            nor loaded by peers.
        halves: whether calls are made in two halves.
        signals: with halves: the counters for which calls wait; None if rows are complete.
        x, weights, topk_weights, order_ids, added, desc: the arguments of the first call of the form, which are
            checked.

    Attributes:
        form: the object that makes the calls in C.
    """

    def __init__(
        self,
        parts: LayerParts,
        call: str,
        halves: bool,
        signals: Signals | None,
        x: Any,
        weights: Any,
        topk_weights: Any,
        order_ids: Any,
        added: tuple[Any, ...],
        desc: EPAllToAllLayoutDesc,
        *_: Any,
    ) -> None:
        config, ctx = parts.options.config, parts.ctx
        of_tokens = call == "combine"
        self._width = config.hidden if of_tokens else config.topk
        self._token = config.token if of_tokens else input_view(ctx.group, x, parts.arguments.rows).dtype
        parts.own_desc(desc)
        shape = (*(parts.leading(desc.rows) if of_tokens else (desc.rows,)), self._width)
        id_bytes = _check_combine(parts, x, weights, topk_weights, order_ids, added, desc, shape, self._token.name)
        arrays = (x, weights, topk_weights, order_ids, *added)
        super().__init__(parts, arrays, name_of(call, weights, halves=halves), self._token.name)
        # Peers load rows only if the call is whole and has no row weights.
        loads = of_tokens and not halves and weights is None and not ctx.workspace.experts.local_combine
        buffers = ctx.workspace.outputs if loads else None
        launch = ctx.combines[self._token.name].copy() if signals is None else ctx.signalled_combine()
        filled = ffi.cast("ProxycclCombine *", launch.packed(1))
        if signals is not None:
            signals.add(launch)
        filled.hidden, filled.id_bytes = self._width, id_bytes
        passing, passing_at, after_copy, step = 0, 0, None, 0
        if buffers is not None and (passing := buffers.passing):
            passing_at = buffers.address(passing)
            copied = StreamOperations(self._group.runtime, [CopyBytes(1, 2, 1), launch])
            after_copy, step = self.prepared(copied), copied.step_address(0)
        padded = parts.options.padded_rows if of_tokens else 0
        row_bytes = self._width * self._token.itemsize
        make, native = self._arrays.maker, self._arrays.type_of(self._token)
        self.form = CombineForm(
            self.common(launch, launch),
            after_copy,
            (self._width, row_bytes, config.num_experts_per_rank if padded else 0, padded),
            parts.arguments.spare_rows,
            halves,
            address_of(filled),
            (None if buffers is None else buffers.numbers, passing, passing_at, step),
            ctx,
            lambda tokens: make((tokens, self._width), (self._width, 1), native),
            (parts.own_desc, self._check_output),
        )

    def _check_output(self, desc: EPAllToAllLayoutDesc, out: Any, overlaps: int) -> int:
        at = output_array(self._group, out, {}, (desc.num_dispatch_token_cur_rank, self._width), self._token)
        if overlaps:
            raise ArgumentError("out", OVERLAPS)
        return at


def _check_combine(
    parts: LayerParts,
    x: Any,
    weights: Any,
    topk_weights: Any,
    order_ids: Any,
    added: Sequence[Any],
    desc: EPAllToAllLayoutDesc,
    shape: tuple[int, ...],
    dtype: str,
) -> int:
    """Checks a call's arrays against the shape and type of its rows. Returns the size of an id of `order_ids` in bytes;
    0 without `order_ids`.
    """
    group, names, tokens = parts.ctx.group, parts.arguments, desc.num_dispatch_token_cur_rank
    slots = (tokens, parts.options.config.topk)
    input_array(group, x, names.rows, shape, dtype, spare_rows=names.spare_rows)
    if weights is not None:
        input_array(group, weights, "weights", shape[:-1], "float32")
    if topk_weights is not None:
        if not parts.sums_on_own_node:
            raise ArgumentError("topk_weights", "needs one node whose ranks reach each other, and no local combine")
        input_array(group, topk_weights, "topk_weights", slots, "float32")
    if len(added) > MOST_ADDED:
        raise ArgumentError("added", f"are {len(added)} arrays; expected at most {MOST_ADDED}")
    for each in added:
        input_array(group, each, "added", (tokens, shape[-1]), dtype)
    if order_ids is None:
        return 0
    if not parts.sums_ranks_in_turn:
        raise ArgumentError("order_ids", "needs one node, one row or sum from each rank, and no placement")
    return index_array(group, order_ids, "order_ids", slots).dtype.itemsize
