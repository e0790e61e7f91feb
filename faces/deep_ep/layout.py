"""`get_dispatch_layout`: a rank's tokens by destination, counted from its own expert ids."""

from __future__ import annotations

import torch

from proxyccl.channels.expert_parallel.arguments import whole_number
from proxyccl.deep_ep.arguments import require_ids
from proxyccl.device.errors import ArgumentError

Layout = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]


def dispatch_layout(topk_idx: torch.Tensor, num_experts: int, num_ranks: int, num_nodes: int) -> Layout:
    """The results of `Buffer.get_dispatch_layout`, except the event."""
    require_ids(topk_idx)
    if whole_number("num_experts", num_experts, 1) % num_ranks:
        raise ArgumentError("num_experts", f"must be a positive multiple of the {num_ranks} ranks, not {num_experts}")
    # Slots without an expert count for one more expert, of one more rank, which is cut off.
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
