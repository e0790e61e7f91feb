"""Dispatches without expert ids: a token goes to the ranks that the caller names, and its experts are not told."""

from __future__ import annotations

import torch

from proxyccl.channels.expert_parallel.config import MAX_TOPK
from proxyccl.deep_ep.layers import Layers
from proxyccl.device.errors import ArgumentError


def ranks_as_ids(is_token_in_rank: torch.Tensor) -> torch.Tensor:
    """int32 [T, n]: the ranks of each token in ascending order, and -1 past the last. Where a token has more ranks than
    a layer takes, the last entry is out of range, which the layer reports on all ranks.
    """
    ranks = is_token_in_rank.shape[1]
    numbers = torch.arange(ranks, dtype=torch.int32, device=is_token_in_rank.device)
    if ranks <= MAX_TOPK:
        return torch.where(is_token_in_rank, numbers, -1)
    ordered = torch.where(is_token_in_rank, numbers, ranks).sort(1).values
    ids = torch.where(ordered < ranks, ordered, -1)
    ids[:, MAX_TOPK - 1] = torch.where(ids[:, MAX_TOPK] < 0, ids[:, MAX_TOPK - 1], ranks)
    return ids[:, :MAX_TOPK].contiguous()


def too_many_ranks() -> ArgumentError:
    """The error for such a token."""
    return ArgumentError(
        "is_token_in_rank", f"names more than {MAX_TOPK} ranks for a token of some rank; expected at most {MAX_TOPK}"
    )


class CountsUnderWay:
    """How many rows come for each expert of this rank, by what all ranks say. They are on their way to the CPU when
    this is made, so that a caller can queue its dispatch before it waits for them. All ranks make it together.

    Args:
        layers: of the ranks.
        num_tokens_per_expert: int32 [experts]: how many of this rank's tokens each expert of all ranks gets.
        ranks: their number, with those that are lost.
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
        """Waits for them, and returns each rounded up to a multiple of `alignment`."""
        if self._event is not None:
            self._event.synchronize()
        return [-(-count // alignment) * alignment for count in self._counts.tolist()]
