"""Low-latency mode: dispatch and combine of few tokens, with room for the most rows of each expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from proxyccl.deep_ep.float8 import (
    ELEMENTS,
    column_major,
    packed_exponents,
    quantize_rounded,
    require_packable,
)
from proxyccl.deep_ep.handles import Handle, Routing, Rows, low_latency_handle, routing_of
from proxyccl.deep_ep.layers import Layers, Shape
from proxyccl.device.errors import ArgumentError

Hook = Callable[[], None]


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
) -> tuple[Rows, torch.Tensor, Handle, Hook]:
    """What `Buffer.low_latency_dispatch` returns, but for the event. The hook receives the rows."""
    if use_ue8m0 and not round_scale:
        raise ArgumentError("use_ue8m0", "needs round_scale=True, as its scales are powers of two")
    if x.dim() != 2 or topk_idx.dim() != 2:
        raise ArgumentError("x", f"has shape {list(x.shape)}, topk_idx {list(topk_idx.shape)}; expected two dimensions")
    hidden = x.shape[1]
    if use_ue8m0:
        require_packable(hidden)
    scale_elements = ELEMENTS if use_fp8 else 0
    shape = Shape("padded", hidden, topk_idx.shape[1], num_experts, "bfloat16", num_sms, scale_elements)
    layer = layers.of_size(shape, max_tokens)
    ids = torch.where(topk_idx < 0, num_experts, topk_idx).to(torch.int32)
    pending = layer.dispatch_send(quantize_rounded(x) if use_fp8 and round_scale else x, ids)
    assert pending.output is not None
    desc, received = pending.desc, pending.output.rows
    scales = None
    if use_fp8:
        made = packed_exponents(received[1]) if use_ue8m0 else received[1]
        scales = column_major(made)

    def receive() -> None:
        layer.dispatch_recv(pending)
        if scales is not None:
            scales.copy_(packed_exponents(received[1]) if use_ue8m0 else received[1])
        if stats is not None:
            stats.add_(desc.expert_rows)

    handle = low_latency_handle(Routing(layer, desc), max_tokens, hidden, num_experts)
    return received if scales is None else (received[0], scales), desc.expert_rows, handle, receive


def combine(
    x: torch.Tensor, topk_weights: torch.Tensor, handle: Any, out: torch.Tensor | None
) -> tuple[torch.Tensor, Hook]:
    """What `Buffer.low_latency_combine` returns, but for the event. The hook receives and sums the rows."""
    routing = routing_of(handle)
    layer, desc = routing.layer, routing.desc
    if layer.sums_on_own_node:
        pending = layer.combine_send(x, desc, topk_weights=topk_weights)
    else:
        pending = layer.combine_send(x, desc, weights=layer.weights_by_row(topk_weights, desc))
    if out is None:
        out = x.new_empty(desc.num_dispatch_token_cur_rank, x.shape[-1])
    target = out

    def receive() -> None:
        layer.combine_recv(pending, out=target)

    return target, receive
