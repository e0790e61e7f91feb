"""A part of gloo_clients.py, in which ranks compare dispatches and combines with the references of deep_ep.utils."""

from __future__ import annotations

from typing import Any

import deep_ep
import torch
from deep_ep.utils.envs import dist_print, get_local_seed, init_dist
from deep_ep.utils.math import per_token_cast_to_fp8
from deep_ep.utils.refs import combine, dispatch, generate_pre_combine_data

EXPERTS, TOPK, HIDDEN, MOST = 8, 3, 256, 16


def joined(rank: int, ranks: int) -> Any:
    """Returns `init_dist`'s group of all ranks, and restores torch's default dtype and device, which `init_dist`
    changes.
    """
    number, total, group = init_dist(rank, ranks, seed=7)
    assert (number, total, get_local_seed()) == (rank, ranks, 7 + rank)
    assert torch.get_default_dtype() == torch.bfloat16
    assert deep_ep.get_physical_domain_size(group) == deep_ep.get_logical_domain_size(group) == (1, ranks)
    dist_print("of all ranks")
    dist_print("of the node", once_in_node=True)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device("cpu")
    return group


def require_references(group: Any, rank: int, ranks: int) -> None:
    """Raises AssertionError if a dispatch or a combine differs from its reference."""
    tokens = 5 + rank
    x = torch.randn(tokens, HIDDEN).to(torch.bfloat16)
    ids = torch.rand(tokens, EXPERTS).topk(TOPK).indices
    weights = torch.rand(tokens, TOPK)
    buffer = deep_ep.Buffer(group, explicitly_destroy=True)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    layout = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
    for sent in (x, per_token_cast_to_fp8(x)):
        rows, row_ids, row_weights, numbers, came = dispatch(sent, ids, weights, MOST, EXPERTS)
        got, got_ids, got_weights, _, handle, _ = buffer.dispatch(sent, topk_idx=ids, topk_weights=weights, **layout)
        for expected, received in zip(*((rows, got) if isinstance(rows, tuple) else ((rows,), (got,))), strict=True):
            assert torch.equal(expected.float(), received.float())
        assert torch.equal(row_ids, got_ids)
        assert torch.equal(torch.where(row_ids < 0, 0, row_weights), got_weights)
        assert came.tolist() == [int((numbers // MOST == source).sum()) for source in range(ranks)]
        assert torch.equal(numbers % MOST, handle[3])
    # Each rank adds its rows of a token, and the token's source rank adds these sums.
    made = generate_pre_combine_data(numbers, MOST, TOPK, HIDDEN)
    here = torch.where(row_ids >= 0, 1.0, 0.0).unsqueeze(2).to(made.dtype)
    own = torch.arange(tokens) + rank * MOST
    expected = combine(generate_pre_combine_data(own, MOST, TOPK, HIDDEN), ids, 1, ranks, EXPERTS, None, True, False)
    combined, _, _ = buffer.combine((made * here).float().sum(1).to(torch.bfloat16), handle)
    torch.testing.assert_close(combined, expected, rtol=0.02, atol=0.02)
    buffer.destroy()
