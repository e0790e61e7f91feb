"""Normal mode: dispatch and combine of many tokens, a row for each token and rank."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch

from proxyccl.channels.expert_parallel.combine_form import NO_SUMS, Sums
from proxyccl.deep_ep.arguments import require_beside, require_bias, require_ids, require_tensor
from proxyccl.deep_ep.chosen_ranks import CountsUnderWay, ranks_as_ids, too_many_ranks
from proxyccl.deep_ep.handles import Handle, NormalHandle, Routing, Rows, normal_handle, routing_of
from proxyccl.deep_ep.layers import Layers, Shape
from proxyccl.deep_ep.tokens import Tokens
from proxyccl.device.errors import ArgumentError

Dispatched: TypeAlias = "tuple[Rows, torch.Tensor | None, torch.Tensor | None, list[int], Handle]"


class Options(NamedTuple):
    """The options of `Buffer.dispatch`; `most_rows` are its num_worst_tokens, None for 0."""

    ranks: int
    expert_alignment: int
    most_rows: int | None
    num_sms: int
    nodes: int


def dispatch(
    layers: Layers,
    options: Options,
    x: Rows,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    is_token_in_rank: torch.Tensor,
    num_tokens_per_expert: torch.Tensor,
) -> Dispatched:
    """The results of `Buffer.dispatch` for a call without a handle, except the event."""

    given = x, topk_idx, is_token_in_rank, num_tokens_per_expert
    tokens: Tokens | None = None
    if isinstance(x, torch.Tensor):
        key = _form_of(options, *given)
        shape = layers.forms.get(key) or layers.add_form(key, _check(options, *given)[0])
    else:
        shape, tokens = _check(options, *given)
    try:
        moved = x if tokens is None else tokens.moved
        values, weights, desc, layer = layers.dispatch(shape, moved, topk_idx, topk_weights)
    except ArgumentError:
        _check(options, *given)  # in DeepEP's words
        raise
    counts = [] if options.most_rows is not None else desc.num_tokens_per_expert(options.expert_alignment)
    ids = desc.local_expert_ids
    if ids.dtype is not topk_idx.dtype:  # of a layer that has lost ranks
        ids = ids.to(topk_idx.dtype)
    num_sms, nodes = options.num_sms, options.nodes
    handle = normal_handle(Routing(layer, desc), is_token_in_rank, num_sms=num_sms, nodes=nodes, has_ids=True)
    return values if tokens is None else tokens.as_given(values), ids, weights, counts, handle


def _form_of(options: Options, x: Any, topk_idx: Any, in_rank: Any, per_expert: Any) -> tuple[Any, ...]:
    """The part of a call's arguments that decides about its layer; () if one is not a tensor, which is refused."""
    try:
        of_tokens = x.shape[1], x.dtype, topk_idx.shape[1], topk_idx.dtype
        of_choices = in_rank.shape[1:], in_rank.dtype, per_expert.shape
    except (AttributeError, IndexError, TypeError):
        return ()
    return (*of_tokens, *of_choices, options.num_sms, options.most_rows)


def _check(options: Options, x: Any, topk_idx: Any, in_rank: Any, per_expert: Any) -> tuple[Shape, Tokens]:
    """Checks the tensors of a call. Returns the shape of its layer, and the tokens."""
    require_choices(in_rank, per_expert, options.ranks)
    tokens = Tokens.of(x)
    require_ids(topk_idx, len(tokens.rows))
    sizes = tokens.rows.shape[1], topk_idx.shape[1], per_expert.shape[0]
    shape = Shape("rank", *sizes, tokens.dtype, options.num_sms, tokens.num_scales, options.most_rows)
    return shape, tokens


def require_choices(is_token_in_rank: Any, num_tokens_per_expert: Any, ranks: int) -> None:
    """Checks the arguments is_token_in_rank and num_tokens_per_expert."""
    require_tensor("num_tokens_per_expert", num_tokens_per_expert, (None,))
    require_tensor("is_token_in_rank", is_token_in_rank, (None, ranks), (torch.bool,))


def dispatch_to_ranks(
    layers: Layers, options: Options, x: Rows, is_token_in_rank: torch.Tensor, num_tokens_per_expert: torch.Tensor
) -> Dispatched:
    """The same for a call without expert ids. Its layer takes each rank for one expert."""
    ranks, expert_alignment, most_rows, num_sms, nodes = options
    require_choices(is_token_in_rank, num_tokens_per_expert, ranks)
    tokens = Tokens.of(x)
    rows = tokens.rows
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
    routing: Routing,
    topk_weights: torch.Tensor | None,
    bias: Any,
    *,
    order_ids: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The results of `Buffer.combine`, except the event. `order_ids` as for `EPAll2AllLayer.combine`."""
    desc, config = routing.desc, routing.layer.ep_config
    if not isinstance(x, torch.Tensor) or bias is not None or topk_weights is not None:
        require_tensor("x", x, (desc.rows, config.hidden))
    added = () if bias is None else require_bias(bias, desc.num_dispatch_token_cur_rank, config.hidden, x.dtype)
    if topk_weights is not None:
        if isinstance(handle, NormalHandle) and not handle.has_ids:
            raise ArgumentError("topk_weights", "can't be given with the handle of a dispatch without topk_idx")
        of_rows = (desc.rows, config.topk) if routing.layer.layout == "rank" else (desc.rows,)
        require_tensor("topk_weights", topk_weights, of_rows, (torch.float32,))
    sums = Sums(added, order_ids) if added or order_ids is not None else NO_SUMS
    try:
        output: torch.Tensor = routing.layer.combine_unrecorded(x, desc, sums=sums)
    except ArgumentError:
        require_tensor("x", x, (desc.rows, config.hidden))  # in DeepEP's words
        raise
    weights = None if topk_weights is None else routing.layer.combine_weights(topk_weights, desc)
    return output, weights
