"""Normal mode: dispatch and combine of many tokens, a row for each token and rank."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from proxyccl.channels.expert_parallel.combine_form import NO_SUMS, Sums
from proxyccl.deep_ep.arguments import require_beside, require_bias, require_ids, require_tensor
from proxyccl.deep_ep.chosen_ranks import CountsUnderWay, ranks_as_ids, too_many_ranks
from proxyccl.deep_ep.handles import Handle, NormalHandle, Routing, Rows, normal_handle, routing_of
from proxyccl.deep_ep.layers import Layers, Shape
from proxyccl.deep_ep.tokens import Tokens
from proxyccl.device.errors import ArgumentError

Dispatched: TypeAlias = "tuple[Rows, torch.Tensor | None, torch.Tensor | None, list[int], Handle]"


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
    nodes: int,
) -> Dispatched:
    """The results of `Buffer.dispatch` for a call without a handle, except the event."""
    tokens = Tokens.of(x)
    require_ids(topk_idx, len(tokens.rows))
    hidden, topk = tokens.rows.shape[1], topk_idx.shape[1]
    shape = Shape("rank", hidden, topk, num_experts, tokens.dtype, num_sms, tokens.num_scales, most_rows)
    values, weights, desc, layer = layers.dispatch(shape, tokens.moved, topk_idx, topk_weights)
    counts = [] if most_rows is not None else desc.num_tokens_per_expert(expert_alignment)
    ids = desc.local_expert_ids
    if ids.dtype is not topk_idx.dtype:  # of a layer that has lost ranks
        ids = ids.to(topk_idx.dtype)
    handle = normal_handle(Routing(layer, desc), is_token_in_rank, num_sms=num_sms, nodes=nodes, has_ids=True)
    return tokens.as_given(values), ids, weights, counts, handle


def dispatch_to_ranks(
    layers: Layers,
    x: Rows,
    is_token_in_rank: torch.Tensor,
    num_tokens_per_expert: torch.Tensor,
    *,
    expert_alignment: int,
    most_rows: int | None,
    num_sms: int,
    nodes: int,
) -> Dispatched:
    """The same for a call without expert ids. Its layer takes each rank for one expert."""
    tokens = Tokens.of(x)
    rows, ranks = tokens.rows, is_token_in_rank.shape[1]
    require_tensor("is_token_in_rank", is_token_in_rank, (len(rows), ranks))
    require_tensor("num_tokens_per_expert", num_tokens_per_expert, (None,), (torch.int32, torch.int64))
    require_beside("is_token_in_rank", is_token_in_rank, rows)
    require_beside("num_tokens_per_expert", num_tokens_per_expert, rows)
    ids = ranks_as_ids(is_token_in_rank)
    shape = Shape("rank", rows.shape[1], ids.shape[1], ranks, tokens.dtype, num_sms, tokens.num_scales, most_rows)
    counts = None if most_rows is not None else CountsUnderWay(layers, num_tokens_per_expert, ranks)
    try:
        values, _, desc, layer = layers.dispatch(shape, tokens.moved, ids, None)
    except ArgumentError as error:
        raise (too_many_ranks() if error.argument == "exp_indices" else error) from None
    handle = normal_handle(Routing(layer, desc), is_token_in_rank, num_sms=num_sms, nodes=nodes, has_ids=False)
    return tokens.as_given(values), None, None, counts.aligned(expert_alignment) if counts else [], handle


def repeat(x: Rows, handle: Any, *, scales_by_columns: bool = False) -> Rows:
    """The rows of a dispatch by the routing of an earlier one."""
    routing, tokens = routing_of(handle), Tokens.of(x)
    with torch.no_grad():
        rows = routing.layer.redispatch(tokens.moved, routing.desc)
    return tokens.as_given(rows, by_columns=scales_by_columns)


def combine(
    x: torch.Tensor,
    handle: Any,
    topk_weights: torch.Tensor | None,
    bias: Any,
    *,
    order_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The results of `Buffer.combine`, except the event. `order_ids` as for `EPAll2AllLayer.combine`."""
    routing = routing_of(handle)
    desc, config = routing.desc, routing.layer.ep_config
    require_tensor("x", x, (desc.rows, config.hidden))
    added = require_bias(bias, desc.num_dispatch_token_cur_rank, config.hidden, x.dtype)
    if topk_weights is not None:
        if isinstance(handle, NormalHandle) and not handle.has_ids:
            raise ArgumentError("topk_weights", "can't be given with the handle of a dispatch without topk_idx")
        of_rows = (desc.rows, config.topk) if routing.layer.layout == "rank" else (desc.rows,)
        require_tensor("topk_weights", topk_weights, of_rows, (torch.float32,))
    sums = Sums(added, order_ids) if added or order_ids is not None else NO_SUMS
    output: torch.Tensor = routing.layer.combine_unrecorded(x, desc, sums=sums)
    weights = None if topk_weights is None else routing.layer.combine_weights(topk_weights, desc)
    return output, weights
