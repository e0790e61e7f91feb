"""Normal mode: dispatch and combine of many tokens, a row for each token and rank."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from proxyccl.deep_ep.arguments import require_beside, require_bias, require_ids, require_tensor
from proxyccl.deep_ep.chosen_ranks import CountsUnderWay, ranks_as_ids, too_many_ranks
from proxyccl.deep_ep.handles import Handle, NormalHandle, Routing, Rows, normal_handle, routing_of
from proxyccl.deep_ep.layers import Layers, Shape
from proxyccl.deep_ep.tokens import Tokens
from proxyccl.device.errors import ArgumentError

_DIMENSIONS = 2  # of choices of ranks
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
    if isinstance(x, torch.Tensor):
        layers.keep((num_experts, num_sms, most_rows or 0), shape)
    counts = [] if most_rows is not None else desc.num_tokens_per_expert(expert_alignment)
    ids = desc.local_expert_ids
    if ids.dtype is not topk_idx.dtype:  # of a layer that has lost ranks
        ids = ids.to(topk_idx.dtype)
    handle = normal_handle(Routing(layer, desc), is_token_in_rank, num_sms=num_sms, nodes=nodes, has_ids=True)
    return tokens.as_given(values), ids, weights, counts, handle


def dispatch_again(
    layers: Layers,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    is_token_in_rank: Any,
    num_tokens_per_expert: Any,
    ranks: int,
    expert_alignment: Any,
    num_worst_tokens: Any,
    num_sms: Any,
    nodes: int,
) -> Dispatched | None:
    """The results of `Buffer.dispatch` for a call like one that was made before, except the event. None, and nothing
    done, if it must be made as the first. It is not recorded for a backward pass.
    """
    if not type(is_token_in_rank) is type(num_tokens_per_expert) is torch.Tensor:
        return None
    if type(expert_alignment) is not int or expert_alignment < 1 or type(num_worst_tokens) is not int:
        return None
    in_rank, experts = is_token_in_rank.shape, num_tokens_per_expert.shape
    if is_token_in_rank.dtype is not torch.bool or len(in_rank) != _DIMENSIONS or in_rank[1] != ranks:
        return None
    if len(experts) != 1:
        return None
    made = layers.dispatch_again((experts[0], num_sms, num_worst_tokens), x, topk_idx, topk_weights)
    if made is None:
        return None
    values, weights, desc, layer = made
    counts = [] if num_worst_tokens else desc.num_tokens_per_expert(expert_alignment)
    handle = normal_handle(Routing(layer, desc), is_token_in_rank, num_sms=num_sms, nodes=nodes, has_ids=True)
    return values, desc.local_expert_ids, weights, counts, handle


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
    return tokens.as_given(routing.layer.redispatch(tokens.moved, routing.desc), by_columns=scales_by_columns)


def combine_again(x: Any, handle: NormalHandle) -> torch.Tensor | None:
    """The first result of `Buffer.combine` for a call like one that was made before, without weights and biases. None,
    and nothing done, if it must be made as the first. It is not recorded for a backward pass.
    """
    routing = handle.routing
    output: torch.Tensor | None = routing.layer.repeat_combine(x, routing.desc)
    return output


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
    output: torch.Tensor = routing.layer.combine(x, desc, added=added, order_ids=order_ids)
    weights = None if topk_weights is None else routing.layer.combine_weights(topk_weights, desc)
    return output, weights
