"""Computes the results of dispatch and combine with torch.distributed, for tests."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from deep_ep.utils.envs import get_global_seed

_PRIME = 131071


def dispatch(
    x: Any, topk_idx: Any, topk_weights: Any, num_max_tokens_per_rank: int, num_experts: int
) -> tuple[Any, ...]:
    """Sends each token once to every rank that has one of its experts.

    Args:
        x: [T, hidden], or a pair of such rows and scales, [T, n].
        topk_idx, topk_weights: [T, topk].
        num_max_tokens_per_rank: token t of rank r has the number r * num_max_tokens_per_rank + t.
        num_experts: the experts of all ranks together.

    Returns:
        The rows, ordered by source rank and token; the experts' numbers on this rank, or -1 for experts of other ranks;
        all weights of each row; the number of each row's token; and int32 [ranks] on the CPU, the number of rows from
        each rank.
    """
    ranks, per_rank = dist.get_world_size(), num_experts // dist.get_world_size()
    rows, scales = x if isinstance(x, tuple) else (x, None)
    goes = [((topk_idx >= 0) & (topk_idx // per_rank == rank)).any(1).nonzero().flatten() for rank in range(ranks)]
    order, sent = torch.cat(goes), [len(each) for each in goes]
    counts = torch.empty(ranks, dtype=torch.int32, device=rows.device)
    dist.all_to_all_single(counts, torch.tensor(sent, dtype=torch.int32, device=rows.device))
    came = counts.tolist()

    def exchanged(values: Any) -> Any:
        given = values[order].contiguous()
        got = given.new_empty(sum(came), *given.shape[1:])
        raw = (got, given) if got.element_size() > 1 else (got.view(torch.uint8), given.view(torch.uint8))
        dist.all_to_all_single(*raw, came, sent)
        return got

    received = exchanged(rows)
    if scales is not None:
        received = received, exchanged(scales)
    ids = exchanged(topk_idx) - dist.get_rank() * per_rank
    numbers = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    sources = exchanged(numbers + dist.get_rank() * num_max_tokens_per_rank)
    ids = torch.where((ids >= 0) & (ids < per_rank), ids, -1)
    return received, ids, exchanged(topk_weights), sources, torch.tensor(came, dtype=torch.int32, device="cpu")


def generate_pre_combine_data(
    src_token_global_idx: Any, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> Any:
    """Returns bfloat16 [rows, num_topk, hidden]: values that depend only on the number of the row's token, the slot and
    the column, so that each rank can compute the values that other ranks send.
    """
    device = src_token_global_idx.device
    slots = src_token_global_idx.long().unsqueeze(1) * num_topk + torch.arange(num_topk, device=device)
    most = dist.get_world_size() * num_max_tokens_per_rank * num_topk
    slopes = ((slots * _PRIME % most).float() + 1) / most
    columns = torch.arange(1, hidden + 1, dtype=torch.float32, device=device)
    return torch.sin(slopes.unsqueeze(2) * columns + math.sin(get_global_seed())).to(torch.bfloat16)


def ordered_accumulate(data: Any, initial_value: Any = None) -> Any:
    """Sums data, [T, topk, hidden], over the slots, in float32 and in the order of the slots. Returns [T, hidden] in
    the type of the data. If `initial_value` is given, it is the first term of the sums.
    """
    shape, device = (data.shape[0], data.shape[2]), data.device
    total = torch.zeros(shape, dtype=torch.float32, device=device) if initial_value is None else initial_value.float()
    for slot in data.float().unbind(1):
        total = total + slot
    return total.to(data.dtype)


def combine(
    y: Any,
    topk_idx: Any,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: Any,
    reduce_in_local: bool,
    reduce_in_scaleup: bool,
) -> Any:
    """Returns the sums of each token's rows, [T, hidden].

    Args:
        y: the row of each slot, [T, topk, hidden].
        topk_idx: the expert of each slot, [T, topk].
        num_scaleout_ranks, num_scaleup_ranks: the number of nodes, and the number of ranks on each node.
        num_experts: the experts of all ranks together.
        bias: [T, hidden], a pair of such tensors, or None: the initial value of the sums.
        reduce_in_local: whether each rank first sums its rows of a token, and rounds the sum.
        reduce_in_scaleup: whether each node then sums the rows of its ranks, and rounds the sum.
    """
    per_rank = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    if reduce_in_local:
        y = _sums_of_groups(y, topk_idx // per_rank)
    if reduce_in_scaleup:
        y = _sums_of_groups(y, topk_idx // (per_rank * num_scaleup_ranks))
    first = sum(each.float() for each in bias) if isinstance(bias, tuple) else bias
    return ordered_accumulate(y, first)


def _sums_of_groups(data: Any, groups: Any) -> Any:
    """Sums each group of a token's slots into the group's last slot, and zeroes the group's other slots."""
    result = torch.zeros_like(data)
    for last in range(data.shape[1]):
        same = groups == groups[:, last : last + 1]
        summed = ordered_accumulate(torch.where(same[:, : last + 1, None], data[:, : last + 1], 0))
        result[:, last] = torch.where(same[:, last + 1 :].any(1, keepdim=True), 0, summed)
    return result
