"""Makes scores by which tokens choose experts, such that the first rank gets more tokens than each other rank."""

from __future__ import annotations

from typing import Any

import torch

from deep_ep.utils.math import ceil_div

_STEPS = 20
_MOST = 100.0
_THRESHOLD = 0.9  # a token's chosen experts have scores above the threshold


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool
) -> Any:
    """Returns scores, float32 [num_tokens, num_experts]; a token's num_topk greatest scores choose its experts.

    Args:
        ratio: the first rank's number of tokens, divided by the number of each other rank; at least 1.
        precise: whether the numbers of tokens have exactly this ratio, with equal numbers for all other ranks;
            otherwise the ratio holds only on average over many tokens.

    Raises:
        ValueError: `precise` is true, and num_topk experts can't be chosen at that ratio.
    """
    if precise:
        return get_precise_unbalanced_scores(num_tokens, num_experts, num_ranks, num_topk, ratio)
    return get_random_unbalanced_scores(num_tokens, num_experts, num_ranks, num_topk, ratio)


def get_random_unbalanced_scores(num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float) -> Any:
    """Returns random scores for `get_unbalanced_scores`, with the scores of the first rank's experts scaled by a
    factor.
    """
    low, high = 1.0, _MOST if ratio != 1 else 1.0
    for _ in range(_STEPS if ratio != 1 else 0):
        factor = (low + high) / 2
        tokens = _tokens_of_ranks(_scores(num_tokens, num_experts, num_ranks, factor), num_ranks, num_topk)
        if tokens[0] > tokens[1:].mean() * ratio:
            high = factor
        else:
            low = factor
    return _scores(num_tokens, num_experts, num_ranks, low)


def get_precise_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float
) -> Any:
    """Returns scores for `get_unbalanced_scores`, by which each token chooses equally many experts of each of its
    ranks.
    """
    per_rank = num_experts // num_ranks
    least, most = max(1, ceil_div(num_topk, per_rank)), min(num_topk, num_ranks, int((num_ranks - 1) / ratio) + 1)
    if ratio < 1 or least > most:
        raise ValueError(f"ratio: {ratio} is not possible for {num_topk} of {num_experts} experts of {num_ranks} ranks")
    at_random = _chosen(_scores(num_tokens, num_experts, num_ranks, 1.0), num_topk).view(num_tokens, num_ranks, -1)
    wanted = at_random.any(2).sum(1).clamp(least, most)  # the number of ranks that each token goes to
    goes = _ranks_of_tokens(wanted, num_ranks, ratio)
    # A token chooses equally many experts of each of its ranks. If num_topk is not a multiple of the number of ranks,
    # the token chooses one expert more of each of the first ranks.
    place = goes.cumsum(1) - 1
    choices = torch.where(goes, num_topk // wanted.unsqueeze(1) + (place < (num_topk % wanted).unsqueeze(1)), 0)
    order = torch.rand(num_tokens, num_ranks, per_rank, dtype=torch.float32).argsort(2).argsort(2)
    chosen = (order < choices.unsqueeze(2)).view(num_tokens, num_experts)
    scores = torch.rand(num_tokens, num_experts, dtype=torch.float32)
    return torch.where(chosen, _THRESHOLD + 1e-3 + scores * (1 - _THRESHOLD - 1e-3), scores * _THRESHOLD)


def _ranks_of_tokens(wanted: Any, ranks: int, ratio: float) -> Any:
    """Chooses `wanted[t]` ranks for each token t. Returns bool [T, ranks]: whether each token goes to each rank. The
    first rank gets `ratio` times as many tokens as each other rank; the numbers of the other ranks differ by at most
    one.
    """
    tokens, others = len(wanted), ranks - 1
    first = round(float(wanted.sum()) * ratio / (others + ratio))
    must = wanted == ranks  # bool [T]: whether a token must go to all ranks
    in_order = torch.where(must, -1.0, torch.rand(tokens, dtype=torch.float32)).argsort()
    goes = torch.zeros(tokens, ranks, dtype=torch.bool)
    goes[in_order[: max(first, int(must.sum()))], 0] = True
    left = wanted - goes[:, 0].long()
    begin = left.cumsum(0) - left
    offset = (
        torch.arange(others).unsqueeze(0) - begin.unsqueeze(1)
    ) % others  # each rank's distance from the token's first rank other than rank 0
    goes[:, 1:] = offset < left.unsqueeze(1)
    return goes


def _scores(tokens: int, experts: int, ranks: int, factor: float) -> Any:
    scores = torch.rand(tokens, experts, dtype=torch.float32)
    scores[:, : experts // ranks] *= factor
    return scores


def _chosen(scores: Any, topk: int) -> Any:
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(topk, dim=1).indices, True)


def _tokens_of_ranks(scores: Any, ranks: int, topk: int) -> Any:
    return _chosen(scores, topk).view(len(scores), ranks, -1).any(2).float().sum(0)
