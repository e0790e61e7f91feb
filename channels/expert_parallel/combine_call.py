"""One combine of a layer, from the experts' rows to a sum for each token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from proxyccl.channels.expert_parallel.arguments import index_array, input_array, output_array
from proxyccl.channels.expert_parallel.config import MOST_ADDED
from proxyccl.channels.expert_parallel.context import RECEIVE, SEND
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.channels.expert_parallel.parts import LayerParts
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.errors import ArgumentError
from proxyccl.device.runtime import StreamLike


class Sums(NamedTuple):
    """How sums begin, and their order: `added` and `order_ids` of `EPAll2AllLayer.combine`."""

    added: tuple[Any, ...] = ()
    order_ids: Any = None


NO_SUMS = Sums()


class CombineCall:
    """A combine whose arguments are checked. It is made by `run`, or in two halves by `send` and `receive`.

    Args:
        parts: of the layer.
        desc: of a dispatch of that layer whose rows were received.
        input, weights, topk_weights, stream: see `EPAll2AllLayer.combine`.
        sums: how each sum begins, and its order.

    Attributes:
        desc: as given.
        stream: of the call.
        recorded: the caller's rows and weights, if a library records a call in halves.

    Raises:
        ArgumentError: an argument is wrong.
    """

    def __init__(
        self,
        parts: LayerParts,
        desc: EPAllToAllLayoutDesc,
        input: Any,
        weights: Any,
        topk_weights: Any,
        stream: StreamLike,
        sums: Sums = NO_SUMS,
    ) -> None:
        config, group, leading = parts.options.config, parts.ctx.group, parts.leading(desc.rows)
        self._parts, self.desc = parts, desc
        self.recorded: tuple[Any, ...] = ()
        self._rows = input_array(group, input, "input", (*leading, config.hidden), config.token.name)
        self._weights = self._slot_weights = None
        if weights is not None:
            self._weights = input_array(group, weights, "weights", leading, "float32")
        self.stream = parts.ctx.stream_for(stream, input)
        if topk_weights is not None:
            if not parts.sums_on_own_node:
                raise ArgumentError("topk_weights", "needs one node whose ranks reach each other, and no local combine")
            slots = (desc.num_dispatch_token_cur_rank, config.topk)
            self._slot_weights = input_array(group, topk_weights, "topk_weights", slots, "float32")
        self._added, self._order = self._additions(sums.added), None
        if sums.order_ids is not None:
            if not parts.sums_ranks_in_turn:
                raise ArgumentError("order_ids", "needs one node, and a row or a sum of each rank")
            slots = (desc.num_dispatch_token_cur_rank, config.topk)
            self._order = index_array(group, sums.order_ids, "order_ids", slots)

    def _additions(self, added: Sequence[Any]) -> list[ArrayView]:
        if len(added) > MOST_ADDED:
            raise ArgumentError("added", f"are {len(added)} arrays; expected at most {MOST_ADDED}")
        config, group = self._parts.options.config, self._parts.ctx.group
        shape = (self.desc.num_dispatch_token_cur_rank, config.hidden)
        return [input_array(group, each, "added", shape, config.token.name) for each in added]

    def run(self, out: Any = None) -> Any:
        """Makes the whole call. Returns `out`, or a new array."""
        output, target = self.output(out)
        self._queue("combine", SEND | RECEIVE, target, self._slot_weights, self.stream)
        return output

    def send(self) -> None:
        """Makes the first half."""
        self._queue("combine_send", SEND, None, None, self.stream)

    def output(self, out: Any) -> tuple[Any, ArrayView]:
        """`out`, or a new array, and a view of it. Raises ArgumentError if it does not fit."""
        config = self._parts.options.config
        shape = (self.desc.num_dispatch_token_cur_rank, config.hidden)
        return output_array(self._parts.ctx.group, out, self._rows, shape, config.token)

    def receive(self, output: Any, target: ArrayView, stream: StreamLike) -> Any:
        """Makes the second half on a stream. Returns the output."""
        self._queue("combine_recv", RECEIVE, target, self._slot_weights, stream)
        return output

    def _queue(
        self, name: str, phases: int, target: ArrayView | None, slots: ArrayView | None, stream: StreamLike
    ) -> None:
        self._parts.ctx.combine(
            name, phases, self.desc, self._rows, self._weights, target, stream, slots, self._added, self._order
        )
