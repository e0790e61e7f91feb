"""Normal mode: dispatch and combine of many tokens, with one row for each pair of a token and a rank."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch

from proxyccl.channels.expert_parallel.arguments import whole_number
from proxyccl.channels.expert_parallel.config import MAX_TOPK
from proxyccl.deep_ep.arguments import require_beside, require_bias, require_ids, require_tensor
from proxyccl.deep_ep.handles import Handle, InternodeHandle, NormalHandle, Routing, Rows, routing_of
from proxyccl.deep_ep.layers import Layers, Shape
from proxyccl.deep_ep.tokens import Tokens
from proxyccl.device.arguments.integers import round_up
from proxyccl.device.errors import ArgumentError

Dispatched: TypeAlias = "tuple[Rows, torch.Tensor | None, torch.Tensor | None, list[int], Handle]"


class Options(NamedTuple):
    """The options of `Buffer.dispatch`; `most_rows` is num_worst_tokens, or None if num_worst_tokens is 0."""

    ranks: int
    expert_alignment: int
    most_rows: int | None
    num_sms: int
    nodes: int

    def handle(self, routing: Routing, is_token_in_rank: torch.Tensor, *, has_ids: bool) -> NormalHandle:
        made = InternodeHandle if self.nodes > 1 else NormalHandle
        return made(routing, is_token_in_rank, num_sms=self.num_sms, nodes=self.nodes, has_ids=has_ids)


def dispatch(
    layers: Layers,
    options: Options,
    x: Rows,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    is_token_in_rank: torch.Tensor,
    num_tokens_per_expert: torch.Tensor,
) -> Dispatched:
    """Makes a `Buffer.dispatch` with expert ids and without a handle, and returns that method's results, except the
    event.
    """

    given = x, topk_idx, is_token_in_rank, num_tokens_per_expert
    tokens: Tokens | None = None
    if isinstance(x, torch.Tensor):
        key = _form_of(options, *given)
        shape = layers.forms.get(key) or layers.add_form(key, _check(options, *given)[0])
    else:
        shape, tokens = _check(options, *given)
    moved = x if tokens is None else tokens.moved
    values, weights, desc, layer = layers.dispatch(shape, moved, topk_idx, topk_weights)
    counts = [] if options.most_rows is not None else desc.num_tokens_per_expert(options.expert_alignment)
    ids = desc.local_expert_ids
    if ids.dtype is not topk_idx.dtype:  # a layer that excludes lost ranks converts the ids
        ids = ids.to(topk_idx.dtype)
    handle = options.handle(Routing(layer, desc), is_token_in_rank, has_ids=True)
    return values if tokens is None else tokens.as_given(values), ids, weights, counts, handle


def _form_of(options: Options, x: Any, topk_idx: Any, in_rank: Any, per_expert: Any) -> tuple[Any, ...]:
    try:
        of_tokens = x.shape[1], x.dtype, topk_idx.shape[1], topk_idx.dtype
        of_choices = in_rank.shape[1:], in_rank.dtype, per_expert.shape
    except (AttributeError, IndexError, TypeError):
        return ()
    return (*of_tokens, *of_choices, options.num_sms, options.most_rows)


def _check(options: Options, x: Any, topk_idx: Any, in_rank: Any, per_expert: Any) -> tuple[Shape, Tokens]:
    require_tensor("num_tokens_per_expert", per_expert, (None,))
    require_tensor("is_token_in_rank", in_rank, (None, options.ranks), (torch.bool,))
    tokens = Tokens.of(x)
    require_ids(topk_idx, len(tokens.rows))
    sizes = tokens.rows.shape[1], topk_idx.shape[1], per_expert.shape[0]
    shape = Shape("rank", *sizes, tokens.dtype, options.num_sms, tokens.num_scales, options.most_rows)
    return shape, tokens


def dispatch_to_ranks(
    layers: Layers, options: Options, x: Rows, is_token_in_rank: torch.Tensor, num_tokens_per_expert: torch.Tensor
) -> Dispatched:
    """Makes a `Buffer.dispatch` without expert ids, with a layer that treats each rank as one expert, and returns that
    method's results, except the event.
    """
    ranks, expert_alignment, most_rows, num_sms, _ = options
    tokens = Tokens.of(x)
    rows = tokens.rows
    require_tensor("is_token_in_rank", is_token_in_rank, (len(rows), ranks), (torch.bool,))
    require_tensor("num_tokens_per_expert", num_tokens_per_expert, (None,), (torch.int32, torch.int64))
    require_beside("is_token_in_rank", is_token_in_rank, rows)
    require_beside("num_tokens_per_expert", num_tokens_per_expert, rows)
    ids = _ranks_as_ids(is_token_in_rank)
    shape = Shape("rank", rows.shape[1], ids.shape[1], ranks, tokens.dtype, num_sms, tokens.num_scales, most_rows)
    counts = None if most_rows is not None else _CountsUnderWay(layers, num_tokens_per_expert, ranks)
    try:
        values, _, desc, layer = layers.dispatch(shape, tokens.moved, ids, None)
    except ArgumentError as error:
        if error.argument != "exp_indices":
            raise
        what = f"names more than {MAX_TOPK} ranks for a token of some rank; expected at most {MAX_TOPK}"
        raise ArgumentError("is_token_in_rank", what) from None
    handle = options.handle(Routing(layer, desc), is_token_in_rank, has_ids=False)
    return tokens.as_given(values), None, None, counts.aligned(expert_alignment) if counts else [], handle


def repeat(x: Rows, handle: Any, *, scales_by_columns: bool = False) -> Rows:
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
    """Returns the results of `Buffer.combine`, except the event. For `order_ids` see `EPAll2AllLayer.combine`."""
    desc, config = routing.desc, routing.layer.ep_config
    if not isinstance(x, torch.Tensor) or bias is not None or topk_weights is not None:
        require_tensor("x", x, (desc.rows, config.hidden))
    added = () if bias is None else require_bias(bias, desc.num_dispatch_token_cur_rank, config.hidden, x.dtype)
    if topk_weights is not None:
        if isinstance(handle, NormalHandle) and not handle.has_ids:
            raise ArgumentError("topk_weights", "can't be given with the handle of a dispatch without topk_idx")
        of_rows = (desc.rows, config.topk) if routing.layer.layout == "rank" else (desc.rows,)
        require_tensor("topk_weights", topk_weights, of_rows, (torch.float32,))
    output: torch.Tensor = routing.layer.combine_unrecorded(x, None, None, order_ids, added, desc, None, None)
    weights = None if topk_weights is None else routing.layer.combine_weights(topk_weights, desc)
    return output, weights


def _ranks_as_ids(is_token_in_rank: torch.Tensor) -> torch.Tensor:
    """Returns int32 [T, n]: the ranks of each token, and -1 in unused entries. If a token has more ranks than a layer
    allows, the token's last entry is out of range, so that the layer raises an error on all ranks.
    """
    ranks = is_token_in_rank.shape[1]
    numbers = torch.arange(ranks, dtype=torch.int32, device=is_token_in_rank.device)
    if ranks <= MAX_TOPK:
        return torch.where(is_token_in_rank, numbers, -1)
    ordered = torch.where(is_token_in_rank, numbers, ranks).sort(1).values
    ids = torch.where(ordered < ranks, ordered, -1)
    ids[:, MAX_TOPK - 1] = torch.where(ids[:, MAX_TOPK] < 0, ids[:, MAX_TOPK - 1], ranks)
    return ids[:, :MAX_TOPK].contiguous()


class _CountsUnderWay:
    """The number of rows for each expert of this rank, which is the sum of the numbers that all ranks passed. The
    constructor, which all ranks call together, starts to copy the sums to the CPU; the caller queues its dispatch
    before it waits for the copy. `ranks` includes lost ranks.
    """

    def __init__(self, layers: Layers, num_tokens_per_expert: torch.Tensor, ranks: int) -> None:
        experts = len(num_tokens_per_expert)
        if not experts or experts % ranks:
            raise ArgumentError("num_tokens_per_expert", f"has {experts} experts; expected a multiple of {ranks} ranks")
        left = [rank for rank in range(ranks) if rank not in layers.lost_ranks]
        of_ranks = num_tokens_per_expert.to(torch.int32).view(ranks, -1)
        sent = of_ranks[left].reshape(-1) if layers.lost_ranks else of_ranks.reshape(-1)
        counts = layers.communicator.reduce_scatter(sent)
        self._event = torch.cuda.Event() if counts.is_cuda else None
        self._counts = counts
        if self._event is not None:
            self._counts = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=True)
            self._counts.copy_(counts, non_blocking=True)
            self._event.record()

    def aligned(self, alignment: int) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        return [round_up(count, alignment) for count in self._counts.tolist()]


Layout = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]


def dispatch_layout(topk_idx: torch.Tensor, num_experts: int, num_ranks: int, num_nodes: int) -> Layout:
    """Returns the results of `Buffer.get_dispatch_layout`, except the event."""
    require_ids(topk_idx)
    if whole_number("num_experts", num_experts, 1) % num_ranks:
        raise ArgumentError("num_experts", f"must be a positive multiple of the {num_ranks} ranks, not {num_experts}")
    # Slots without an expert are counted for an additional expert on an additional rank, whose counts are dropped at
    # the end.
    ids = topk_idx.to(torch.int64)
    ids = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    per_expert = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    per_expert.scatter_add_(0, ids.reshape(-1), torch.ones_like(ids, dtype=torch.int32).reshape(-1))
    in_rank = torch.zeros(len(ids), num_ranks + 1, dtype=torch.bool, device=ids.device)
    in_rank.scatter_(1, ids // (num_experts // num_ranks), True)
    in_rank = in_rank[:, :num_ranks].contiguous()
    per_node = None
    if num_nodes > 1:
        in_node = in_rank.view(len(ids), num_nodes, num_ranks // num_nodes).any(2)
        per_node = in_node.sum(0, dtype=torch.int32)
    return in_rank.sum(0, dtype=torch.int32), per_node, per_expert[:num_experts].contiguous(), in_rank
