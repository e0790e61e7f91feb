"""ElasticBuffer's dispatch and combine. A dispatch returns one row for each pair of a token and a rank, or, with
`do_expand`, for each pair of a token and an expert.
"""

from __future__ import annotations

from typing import Any

import torch

from proxyccl.deep_ep import normal
from proxyccl.deep_ep.arguments import refuse, require_ids, require_tensor
from proxyccl.deep_ep.elastic_handle import EPHandle, Options
from proxyccl.deep_ep.handles import Routing, Rows
from proxyccl.deep_ep.layers import Layers, Shape
from proxyccl.deep_ep.tokens import Tokens
from proxyccl.device.errors import ArgumentError

Received = tuple[Rows, torch.Tensor | None, torch.Tensor | None, EPHandle]


def dispatch(
    layers: Layers,
    x: Rows,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    options: Options,
    *,
    clears_gaps: bool,
    scales_by_columns: bool,
) -> Received:
    """Makes an `ElasticBuffer.dispatch` without a handle, and returns that method's results, except the event.

    With clears_gaps, rows without a token are set to zero. With scales_by_columns, the scales of consecutive rows are
    adjacent in memory.
    """
    tokens = Tokens.of(x)
    require_ids(topk_idx, len(tokens.rows))
    hidden, topk, expands = tokens.rows.shape[1], topk_idx.shape[1], options.do_expand
    most = None if options.waits else options.most_rows(topk)
    shape = Shape(
        "expert" if expands else "rank",
        hidden,
        topk,
        options.num_experts,
        tokens.dtype,
        options.num_sms,
        tokens.num_scales,
        None if most is None else most[expands],
        options.expert_alignment if expands else None,
        expands and options.sums_rows,
    )
    layer = layers.of_size(shape, options.num_max_tokens_per_rank)
    received, weights, desc = layer.dispatch(tokens.moved, topk_idx, topk_weights)
    handle = EPHandle(Routing(layer, desc), topk_idx.clone() if options.copies_ids else topk_idx, options, most)
    rows = tokens.as_given(received, by_columns=scales_by_columns)
    return _finished(handle, rows, weights, clears_gaps=clears_gaps)


def repeat(
    x: Rows, topk_weights: torch.Tensor | None, handle: EPHandle, *, clears_gaps: bool, scales_by_columns: bool
) -> Received:
    """Makes an `ElasticBuffer.dispatch` with a handle, and returns that method's results, except the event."""
    layer, desc = handle.routing.layer, handle.routing.desc
    if topk_weights is not None:
        slots = (desc.num_dispatch_token_cur_rank, layer.ep_config.topk)
        require_tensor("topk_weights", topk_weights, slots, (torch.float32,))
    rows = normal.repeat(x, handle, scales_by_columns=scales_by_columns)
    weights = None if topk_weights is None else layer.weights_by_row(topk_weights, desc)
    return _finished(handle, rows, weights, clears_gaps=clears_gaps)


def combine(
    x: torch.Tensor, handle: EPHandle, topk_weights: torch.Tensor | None, bias: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the results of `ElasticBuffer.combine`, except the event."""
    layer, desc, topk = handle.routing.layer, handle.routing.desc, handle.routing.layer.ep_config.topk
    if topk_weights is not None and not handle.do_expand:
        require_tensor("topk_weights", topk_weights, (desc.rows, topk), (torch.float32,))
        topk_weights = topk_weights.masked_fill(desc.local_expert_ids < 0, 0)
    # Adds rows in DeepEP's order, so that the sums have the same bits as DeepEP's. For two rows the order does not
    # matter.
    in_order = layer.sums_ranks_in_turn and (bias is not None or layer.ep_config.world_size > 2)
    return normal.combine(
        x, handle, handle.routing, topk_weights, bias, order_ids=handle.topk_idx if in_order else None
    )


def require_like(handle: EPHandle, **given: Any) -> None:
    """Raises an error if an argument of a dispatch with a handle is not None and differs from the argument of the
    handle's dispatch.
    """
    for argument, value in given.items():
        if value is not None and value != getattr(handle, argument):
            if argument == "do_expand":
                raise refuse("dispatch(do_expand=) unlike the handle's", "a handle has rows of one kind; dispatch anew")
            raise ArgumentError(argument, f"is {value!r}; expected the handle's, {getattr(handle, argument)!r}")


def _finished(handle: EPHandle, rows: Rows, weights: torch.Tensor | None, *, clears_gaps: bool) -> Received:
    desc = handle.routing.desc
    if clears_gaps:
        gaps = desc.row_slots < 0
        for tensor in (*(rows if isinstance(rows, tuple) else (rows,)), weights):
            if tensor is not None:
                bits = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
                bits.masked_fill_(gaps.view(-1, *(1,) * (bits.dim() - 1)), 0)
    ids = None if handle.do_expand else desc.local_expert_ids.to(handle.topk_idx.dtype)
    return rows, ids, weights, handle
