"""Low-latency mode: dispatch and combine of few tokens, with room for the most rows of each expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from proxyccl.channels.expert_parallel.layer import EPAll2AllLayer
from proxyccl.channels.expert_parallel.layout import EPAllToAllLayoutDesc
from proxyccl.deep_ep.arguments import require_ids, require_stats, require_tensor
from proxyccl.deep_ep.float8 import (
    ELEMENTS,
    column_major,
    packed_exponents,
    quantize_rounded,
    require_packable,
)
from proxyccl.deep_ep.handles import Handle, LowLatencyHandle, Routing, Rows, routing_of
from proxyccl.deep_ep.layers import Layers, Shape
from proxyccl.device.errors import ArgumentError

Half = tuple[Callable[[], None], EPAll2AllLayer]
"""The second half of a call, and the layer that makes it."""


@torch.no_grad()
def dispatch(
    layers: Layers,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    *,
    max_tokens: int,
    num_experts: int,
    num_sms: int,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
    stats: torch.Tensor | None,
    hooked: bool,
) -> tuple[Rows, torch.Tensor, Handle, Half | None]:
    """The results of `Buffer.low_latency_dispatch`, except the event. If `hooked`, the second half receives the
    rows."""
    if use_ue8m0 and not round_scale:
        raise ArgumentError("use_ue8m0", "needs round_scale=True, as its scales are powers of two")
    require_tensor("x", x, (None, None), (torch.bfloat16,))
    require_ids(topk_idx, len(x))
    hidden = x.shape[1]
    if use_fp8 and hidden % ELEMENTS:
        raise ArgumentError("x", f"has {hidden} elements in a row; expected a multiple of {ELEMENTS} with use_fp8")
    if use_ue8m0:
        require_packable(hidden)
    scale_elements = ELEMENTS if use_fp8 else 0
    shape = Shape("padded", hidden, topk_idx.shape[1], num_experts, "bfloat16", num_sms, scale_elements)
    layer = layers.of_size(shape, max_tokens, hooked=hooked)
    require_stats(stats, layer.ep_config.num_experts_per_rank)
    tokens = quantize_rounded(x) if use_fp8 and round_scale else x
    pending = layer.dispatch_send(tokens, topk_idx) if hooked else None
    if pending is None:
        received, _, desc = layer.dispatch(tokens, topk_idx)
    else:
        layers.take_turns(shape, max_tokens)
        assert pending.output is not None
        received, desc = pending.output.rows, pending.desc
    handle = LowLatencyHandle(Routing(layer, desc), max_tokens, hidden, num_experts)
    scales = column_major(received[1], packed=True) if use_ue8m0 else None

    def finish() -> None:
        if pending is not None:
            layer.dispatch_recv(pending)
        if scales is not None:
            scales.copy_(packed_exponents(received[1]))
        if stats is not None:
            stats.add_(desc.expert_rows)

    if not hooked:
        finish()
    if not round_scale:
        kept = layers.low_latency.setdefault((max_tokens, num_experts, num_sms, use_fp8, hooked), {})
        if shape not in kept:
            experts = layer.ep_config.num_experts_per_rank
            kept[shape] = Repeated(layers, shape, max_tokens, experts, hooked=hooked)
    rows = received if scales is None else (received[0], scales)
    return rows, desc.expert_rows, handle, (finish, layer) if hooked else None


class Repeated:
    """Dispatches like one that was made before: see `EPAll2AllLayer.repeat_dispatch`.

    Args:
        layers: of the buffer.
        shape: of the calls.
        max_tokens: the most tokens of a rank.
        experts: of this rank.
        hooked: whether hooks receive the rows.
    """

    def __init__(self, layers: Layers, shape: Shape, max_tokens: int, experts: int, *, hooked: bool) -> None:
        self._layers, self._shape, self._max_tokens = layers, shape, max_tokens
        self._layer = None if hooked else layers.of_size(shape, max_tokens, hooked=False)
        self._experts = experts

    def repeat(
        self, x: torch.Tensor, topk_idx: torch.Tensor, stats: torch.Tensor | None
    ) -> tuple[Rows, torch.Tensor, Handle, Half | None] | None:
        """The results of `dispatch`; None, and nothing done, if it must be made as the first."""
        if stats is not None:
            require_stats(stats, self._experts)
        layer, shape = self._layer, self._shape
        if layer is None:
            return self._send(x, topk_idx, stats)
        made = layer.repeat_dispatch(x, topk_idx)
        if made is None:
            return None
        rows, _, desc = made
        expert_rows = desc.expert_rows
        if stats is not None:
            stats.add_(expert_rows)
        handle = LowLatencyHandle(Routing(layer, desc), self._max_tokens, shape.hidden, shape.num_experts)
        return rows, expert_rows, handle, None

    def _send(
        self, x: torch.Tensor, topk_idx: torch.Tensor, stats: torch.Tensor | None
    ) -> tuple[Rows, torch.Tensor, Handle, Half | None] | None:
        layers, shape = self._layers, self._shape
        layer = layers.of_size(shape, self._max_tokens, hooked=True)
        sent = layer.repeat_dispatch(x, topk_idx, halves=True)
        if sent is None:
            return None
        layers.take_turns(shape, self._max_tokens)
        desc = sent.desc
        expert_rows = desc.expert_rows

        def finish() -> None:
            layer.dispatch_recv(sent)
            if stats is not None:
                stats.add_(expert_rows)

        handle = LowLatencyHandle(Routing(layer, desc), self._max_tokens, shape.hidden, shape.num_experts)
        return sent.output.rows, expert_rows, handle, (finish, layer)


def combine_again(
    x: Any, topk_weights: Any, handle: LowLatencyHandle, out: Any, hooked: bool
) -> tuple[torch.Tensor, Half | None] | None:
    """The results of `combine` for a call like one that was made before; None, and nothing done, if there was none."""
    layer, desc = handle.routing.layer, handle.routing.desc
    if not layer.sums_on_own_node:
        return None
    if not hooked:
        combined = layer.repeat_combine(x, desc, topk_weights=topk_weights, out=out)
        return None if combined is None else (combined, None)
    if out is not None:
        _require_out(out, layer, desc)
    pending = layer.repeat_combine(x, desc, topk_weights=topk_weights, halves=True)
    return None if pending is None else _combine_later(layer, pending, x, out)


def _require_out(out: Any, layer: EPAll2AllLayer, desc: EPAllToAllLayoutDesc) -> None:
    require_tensor("out", out, (desc.num_dispatch_token_cur_rank, layer.ep_config.hidden), (torch.bfloat16,))


def _combine_later(
    layer: EPAll2AllLayer, pending: Any, x: torch.Tensor, out: torch.Tensor | None
) -> tuple[torch.Tensor, Half]:
    config = layer.ep_config
    tokens = pending.desc.num_dispatch_token_cur_rank
    target = x.new_empty(tokens, config.hidden) if out is None else out

    def finish() -> None:
        layer.combine_recv(pending, out=target)

    return target, (finish, layer)


@torch.no_grad()
def combine(
    x: torch.Tensor, topk_weights: torch.Tensor, handle: Any, out: torch.Tensor | None, *, hooked: bool
) -> tuple[torch.Tensor, Half | None]:
    """The results of `Buffer.low_latency_combine`, except the event. If `hooked`, the second half receives the rows."""
    routing = routing_of(handle, "padded")
    layer, desc = routing.layer, routing.desc
    desc.require_received(layer.ctx, "handle")
    tokens, config = desc.num_dispatch_token_cur_rank, layer.ep_config
    experts = config.num_experts_per_rank
    require_tensor("x", x, (experts, desc.rows // experts, config.hidden), (torch.bfloat16,))
    require_tensor("topk_weights", topk_weights, (tokens, config.topk), (torch.float32,))
    if out is not None:
        _require_out(out, layer, desc)
    if layer.sums_on_own_node:
        weights = {"topk_weights": topk_weights}
    else:
        weights = {"weights": layer.weights_by_row(topk_weights, desc)}
    if not hooked:
        return layer.combine(x, desc, out=out, **weights), None
    return _combine_later(layer, layer.combine_send(x, desc, **weights), x, out)
