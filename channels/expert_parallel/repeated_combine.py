"""A combine like one that was made before, whole or in two halves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxyccl.channels._prepared_calls import CombineForm
from proxyccl.channels.arguments import input_view
from proxyccl.channels.expert_parallel.arguments import output_array
from proxyccl.channels.expert_parallel.combine_call import NO_SUMS, Sums
from proxyccl.channels.expert_parallel.config import MOST_ADDED
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.parts import LayerParts
from proxyccl.channels.expert_parallel.repeated_call import Maker, RepeatedCall, address_of, describe_kind, name_of
from proxyccl.device._native import ffi, lib
from proxyccl.device.arrays.libraries import libraries
from proxyccl.device.stream_operations import CopyBytes, StreamOperations


class RepeatedCombine(RepeatedCall):
    """A combine, which one kernel makes, after a copy of rows that peers are to load but can't reach where they lie. C
    makes it (repeated_combine.c).

    Args:
        parts: of the layer.
        x, weights, topk_weights, sums: of the earlier call.
        halves: whether it is made in two halves.

    Attributes:
        start: makes a call or, of a call in halves, the first half; see `CombineForm`.
    """

    def __init__(self, parts: LayerParts, x: Any, weights: Any, topk_weights: Any, sums: Sums, *, halves: bool) -> None:
        config = parts.options.config
        super().__init__(parts, x, name_of("combine", weights, halves=halves), config.token.name)
        ctx = parts.ctx
        # Peers load rows only in a call that is made at once and without weights of rows.
        loads = not halves and weights is None and not ctx.workspace.experts.local_combine
        buffers = ctx.workspace.outputs if loads else None
        launch = ctx.combine_launch(config.token.name).copy()
        call = self._call = ffi.cast("ProxycclCombine *", launch.packed(1))
        call.hidden = config.hidden
        self._row_bytes, self._hidden, self._topk = config.hidden * config.token.itemsize, config.hidden, config.topk
        self._token = config.token
        self._id_bytes = 0
        if sums.order_ids is not None:
            self._id_bytes = input_view(self._group, sums.order_ids, "order_ids").dtype.itemsize
        passing = buffers.passing if buffers is not None else 0
        passing_at, after_copy, step = 0, None, 0
        if buffers is not None and passing:
            passing_at = buffers.address(passing)
            self._after_copy = StreamOperations(self._group.runtime, [CopyBytes(1, 2, 1), launch])
            after_copy, step = self.prepared(self._after_copy), address_of(self._after_copy.prepared.steps)
        padded = parts.options.padded_rows
        form = CombineForm(
            self.issuer(),
            self.prepared(launch),
            self.prepared(launch, compared=False),
            after_copy,
            (self._like_kind, describe_kind(weights), describe_kind(topk_weights)),
            (config.hidden, config.topk, self._row_bytes, config.num_experts_per_rank if padded else 0, padded),
            halves,
            address_of(call),
            (None if buffers is None else buffers.numbers, passing, passing_at, step),
            ctx,
            (self._output_maker(x), ctx.arrays.address),
            (None if sums is NO_SUMS else self._place_sums, self._check_output),
        )
        self.start = form.start

    def _output_maker(self, x: Any) -> Callable[[int], Maker]:
        """Returns a function that returns the maker of results for a number of tokens. It does not keep `x`."""
        arrays, token, hidden = self._ctx.arrays, self._token, self._hidden
        like = arrays.new(x, (1,), token)
        return lambda tokens: arrays.maker_of(like, (tokens, hidden), token)

    def _place_sums(self, tokens: int, sums: Sums) -> bool:
        """Fills in how sums begin, and the ids that order them. False if an array does not fit."""
        shape, nbytes, ids_at = (tokens, self._hidden), tokens * self._row_bytes, 0
        begun = [self._at(each, shape, nbytes) for each in sums.added]
        if self._id_bytes:
            ids_at = self._at(sums.order_ids, (tokens, self._topk), tokens * self._topk * self._id_bytes)
        if not all(begun) or bool(ids_at) != bool(self._id_bytes):
            return False
        first, second = [*begun, 0, 0][:MOST_ADDED]
        lib.proxyccl_expert_combine_order(self._call, first, second, ids_at, self._id_bytes)
        return True

    def _at(self, x: Any, shape: tuple[int, ...], nbytes: int) -> int:
        """The address of an array of a known kind; 0 if its shape is another, or if another check must decide."""
        return self._library.memory(x, nbytes) if x.shape == shape else 0

    def _check_output(self, x: Any, desc: EPAllToAllLayoutDesc, out: Any) -> tuple[Any, int]:
        """The caller's array for the second half of a call, and its address. Raises ArgumentError if it does not
        fit.
        """
        shape = (desc.num_dispatch_token_cur_rank, self._hidden)
        target, view = output_array(self._group, out, input_view(self._group, x, "input"), shape, self._token)
        return target, view.ptr


def may_repeat_output(out: Any) -> bool:
    """Whether calls with such an array for the result are repeated. Others than torch's may be read-only."""
    return out is None or libraries[type(out)].is_torch
