"""Dispatches and combines in normal and low-latency mode, and kills the last rank. The other ranks continue with their
buffers; each prints its rank and what it observed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[3] / "packages" / "deep_ep"), str(Path(__file__).parents[2])]

import deep_ep  # noqa: E402

from proxyccl import Communicator, CommunicatorError  # noqa: E402
from support.cases.deep_ep_clients import Mixture, experts_of, only_received, require_close, sums_of_experts  # noqa: E402
from support.processes import FileBootstrap  # noqa: E402

torch.set_num_threads(1)
comm = Communicator(FileBootstrap.from_environment(), timeout=60)
rank, ranks = comm.rank, comm.world_size
mixture, most = Mixture.of(rank, ranks), 32
per_rank = mixture.experts // ranks
buffer = deep_ep.Buffer(comm, low_latency_mode=True, enable_shrink=True)


def without(lost: list[int]) -> Mixture:
    """Returns `mixture` with -1 (no expert) in place of each id of a lost rank's expert."""
    ids = mixture.ids.where(~torch.isin(mixture.ids // per_rank, torch.tensor(lost, dtype=torch.int64)), -1)
    return Mixture(mixture.tokens, ids, mixture.weights, mixture.experts, most)


def low_latency_step(lost: list[int]) -> None:
    arguments = (mixture.tokens, mixture.ids, most, mixture.experts)
    rows, counts, handle, _, _ = buffer.low_latency_dispatch(*arguments, use_fp8=False)
    assert rows.shape == (per_rank, ranks * most, mixture.tokens.shape[1])
    arrived = handle[1] & 0xFFFFFFFF
    assert arrived.shape == (per_rank, ranks)
    assert not arrived[:, lost].any()
    assert arrived.sum(1).tolist() == counts.tolist()
    results = (only_received(rows, counts).float() * experts_of(rank, rows)).to(torch.bfloat16)
    combined, _, _ = buffer.low_latency_combine(results, mixture.ids, mixture.weights, handle)
    require_close(combined, without(lost), float8=False)


def normal_step(lost: list[int]) -> None:
    per_destination, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(mixture.ids, mixture.experts)
    rows, ids, weights, counts, handle, _ = buffer.dispatch(
        mixture.tokens,
        num_tokens_per_rank=per_destination,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=mixture.ids,
        topk_weights=mixture.weights,
    )
    assert len(counts) == per_rank
    assert handle[0].shape == (ranks, ranks)
    assert int(handle[0][-1, rank]) == len(rows)
    combined, _, _ = buffer.combine(sums_of_experts(rows, ids, weights, rank * per_rank), handle)
    require_close(combined, without(lost), float8=False)


def masked() -> list[int]:
    status = torch.full((ranks,), -1, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    return status.tolist()


low_latency_step([])
normal_step([])
assert masked() == [0] * ranks
try:
    while True:
        low_latency_step([])
        if rank == ranks - 1:
            os.kill(os.getpid(), signal.SIGKILL)
except CommunicatorError as error:
    print(rank, type(error).__name__, masked(), end=" ")
for _ in range(3):
    low_latency_step([ranks - 1])
for _ in range(3):
    normal_step([ranks - 1])
print(masked())
