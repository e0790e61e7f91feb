"""Normal mode: dispatch and combine of many tokens, a row for each token and rank."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from proxyccl.deep_ep.float8 import carried
from proxyccl.deep_ep.handles import Handle, Routing, Rows, normal_handle, routing_of
from proxyccl.deep_ep.layers import Layers, Shape
from proxyccl.device.errors import ArgumentError

Dispatched: TypeAlias = "tuple[Rows, torch.Tensor, torch.Tensor | None, list[int], Handle]"


def dispatch(
    layers: Layers,
    x: Rows,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    is_token_in_rank: torch.Tensor,
    *,
    num_experts: int,
    expert_alignment: int,
    most_rows: int | None,
    num_sms: int,
) -> Dispatched:
    """What `Buffer.dispatch` returns for a call without a handle, but for the event."""
    rows, scales = x if isinstance(x, tuple) else (x, None)
    if rows.dim() != 2 or topk_idx.dim() != 2:
        raise ArgumentError(
            "x", f"has shape {list(rows.shape)}, topk_idx {list(topk_idx.shape)}; expected two dimensions"
        )
    tokens, hidden = rows.shape
    moved, scale_elements = None if scales is None else carried(scales, tokens), 0
    if moved is not None:
        scale_elements = hidden // max(1, moved.shape[1])
        if moved.shape[1] * scale_elements != hidden:
            raise ArgumentError("x", f"has {moved.shape[1]} scales of a row, which do not divide its {hidden} elements")
    dtype = str(rows.dtype).removeprefix("torch.") if moved is None else "bfloat16"
    shape = Shape("rank", hidden, topk_idx.shape[1], num_experts, dtype, num_sms, scale_elements, most_rows)
    values, weights, desc, layer = layers.dispatch(
        shape, rows if moved is None else (rows, moved), topk_idx, topk_weights
    )
    received = values if scales is None else (values[0], _like(values[1], scales))
    counts = [] if most_rows is not None else desc.num_tokens_per_expert(expert_alignment)
    ids = desc.local_expert_ids.to(topk_idx.dtype)
    return received, ids, weights, counts, normal_handle(Routing(layer, desc), is_token_in_rank)


def repeat(x: Rows, handle: Any) -> Rows:
    """The rows of a dispatch by the routing of an earlier one."""
    routing = routing_of(handle)
    if not isinstance(x, tuple):
        rows: torch.Tensor = routing.layer.redispatch(x, routing.desc)
        return rows
    values, scales = routing.layer.redispatch((x[0], carried(x[1], len(x[0]))), routing.desc)
    return values, _like(scales, x[1])


def combine(
    x: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None, bias: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `Buffer.combine` returns, but for the event."""
    routing = routing_of(handle)
    output: torch.Tensor = routing.layer.combine(x, routing.desc)
    weights = None if topk_weights is None else routing.layer.combine_weights(topk_weights, routing.desc)
    for each in bias if isinstance(bias, tuple) else () if bias is None else (bias,):
        if each is not None:
            output += each
    return output, weights


def _like(scales: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """Received scales in the type and number of dimensions of those that were given."""
    values = scales.view(given.dtype)
    return values if given.dim() == 2 else values.squeeze(1)
