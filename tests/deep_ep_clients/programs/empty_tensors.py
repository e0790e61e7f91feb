"""Calls DeepEP in all modes, with empty tensors, which torch places at address 0: some ranks have no tokens, others get
no rows.

Kernels are compiled with the options of PROXYCCL_CXXFLAGS, which may enable a sanitizer.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[3] / "packages" / "deep_ep"), str(Path(__file__).parents[2])]

import deep_ep  # noqa: E402

from proxyccl import Communicator  # noqa: E402
from support.running import run_ranks  # noqa: E402

RANKS, EXPERTS, MOST, HIDDEN = 2, 4, 8, 128


def call_all(comm: Communicator, tokens: int, first: int) -> None:
    """Dispatches a rank's tokens to two experts of one rank, and combines the experts' rows."""
    buffer = deep_ep.Buffer(comm)
    x = torch.ones(tokens, HIDDEN, dtype=torch.bfloat16)
    ids = torch.tensor([first, first + 1]).repeat(tokens, 1)
    weights = torch.ones(tokens, 2)
    pair = x.to(torch.float8_e4m3fn), torch.ones(tokens, 1)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
    for worst in (0, RANKS * MOST):
        for given in (x, pair):
            rows, _, row_weights, _, handle, _ = buffer.dispatch(
                given,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=ids,
                topk_weights=weights,
                num_worst_tokens=worst,
            )
            buffer.dispatch(given, handle=handle)
        rows = rows[0].to(torch.bfloat16)
        buffer.combine(rows, handle, topk_weights=row_weights, bias=x)
    for expands in (False, True):
        elastic = deep_ep.ElasticBuffer(comm, num_max_tokens_per_rank=MOST)
        rows, _, row_weights, handle, _ = elastic.dispatch(x, ids, weights, num_experts=EXPERTS, do_expand=expands)
        elastic.combine(rows, handle, topk_weights=row_weights)
        elastic.dispatch(x, topk_weights=weights, handle=handle, do_expand=expands)
    for float8 in (False, True):
        for hooked in (False, True):
            rows, _, handle, _, hook = buffer.low_latency_dispatch(
                x, ids, MOST, EXPERTS, use_fp8=float8, return_recv_hook=hooked
            )
            if hook is not None:
                hook()
            results = rows[0].to(torch.bfloat16) if float8 else rows
            *_, hook = buffer.low_latency_combine(results, ids, weights, handle, return_recv_hook=hooked)
            if hook is not None:
                hook()


def body(comm: Communicator) -> None:
    for tokens in (4 * comm.rank, 4 - 4 * comm.rank, 0):
        for first in (0, 2):
            call_all(comm, tokens, first)


torch.set_num_threads(1)
run_ranks(RANKS, body)
