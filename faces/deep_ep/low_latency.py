"""Low-latency mode: dispatch and combine of few tokens, with room for the most rows of each expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from proxyccl.channels._prepared_calls import SentDispatch
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
from proxyccl.device.errors import ArgumentError, CapacityError, ProxyCCLError

Half = tuple[Callable[[], None], EPAll2AllLayer]
"""The second half of a call, and the layer that makes it."""


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
    num_scales = hidden // ELEMENTS if use_fp8 else 0
    shape = Shape("padded", hidden, topk_idx.shape[1], num_experts, "bfloat16", num_sms, num_scales)
    turns = layers.turns(shape, max_tokens) if hooked else None
    largest = layers.of_size(shape, max_tokens) if turns is None else turns.layers[turns.next]
    layer = largest.narrowed(max_tokens)
    require_stats(stats, layer.ep_config.num_experts_per_rank)
    tokens = quantize_rounded(x) if use_fp8 and round_scale else x

    def finish() -> None:
        if packed is not None:
            packed.copy_(packed_exponents(rows[1]))
        if stats is not None:
            stats.add_(expert_rows)

    half = None
    if turns is None:
        rows, _, desc = layer.dispatch_unrecorded(tokens, topk_idx)
    else:
        sent = layer.send_unrecorded(tokens, topk_idx)
        half = _dispatch_later(layer, sent, finish)
        turns.take()
        rows, desc = sent.rows, sent.desc
    expert_rows = desc.expert_rows
    packed = column_major(rows[1], packed=True) if use_ue8m0 else None
    if half is None:
        finish()
    handle = LowLatencyHandle(Routing(layer, desc), max_tokens, hidden, num_experts)
    return (rows if packed is None else (rows[0], packed)), expert_rows, handle, half


def _dispatch_later(layer: EPAll2AllLayer, pending: SentDispatch, finish: Callable[[], None]) -> Half:
    """The second half of a dispatch, which then calls `finish`; to be made as soon as the first half is queued. If the
    next call of the layer comes before the hook is called, because an exception came between, that call receives the
    rows, and `finish` is left to the hook.
    """
    early: list[ProxyCCLError | None] = []

    def end() -> None:
        early.append(_error_of(lambda: layer.dispatch_recv(pending)))

    def receive() -> None:
        if not early:
            layer.dispatch_recv(pending)
        elif early[0] is not None:
            raise early[0]
        finish()

    layer.under_way.end_dispatch = end
    return receive, layer


def _error_of(call: Callable[[], Any]) -> ProxyCCLError | None:
    """Makes a call whose error is raised later, by the hook of the call to which it belongs."""
    try:
        call()
    except (ArgumentError, CapacityError) as error:
        return error
    return None


def _require_out(out: Any, layer: EPAll2AllLayer, desc: EPAllToAllLayoutDesc) -> None:
    require_tensor("out", out, (desc.num_dispatch_token_cur_rank, layer.ep_config.hidden), (torch.bfloat16,))


def _combine_later(
    layer: EPAll2AllLayer, pending: Any, x: torch.Tensor, out: torch.Tensor | None
) -> tuple[torch.Tensor, Half]:
    """The result of a combine, and its second half; to be made as soon as the first half is queued."""
    early: list[torch.Tensor] = []

    def end() -> None:  # where an exception came before the hook, `out` may have another use by now
        early.append(layer.combine_recv(pending))

    def receive() -> None:
        if early:
            target.copy_(early[0])
        else:
            layer.combine_recv(pending, out=target)

    layer.under_way.end_combine = end
    tokens = pending.desc.num_dispatch_token_cur_rank
    target = x.new_empty(tokens, layer.ep_config.hidden) if out is None else out
    return target, (receive, layer)


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
        return layer.combine_unrecorded(x, desc, out=out, **weights), None
    return _combine_later(layer, layer.send_back_unrecorded(x, desc, **weights), x, out)
