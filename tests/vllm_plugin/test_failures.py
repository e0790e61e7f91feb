"""If a rank's process exits, the other ranks get an error that names the rank, in bounded time."""

from __future__ import annotations

import signal
from typing import Any

import torch
from vllm.distributed import tensor_model_parallel_all_reduce

from proxyccl import PeerLostError


def test_a_killed_rank_is_named(make_ranks: Any) -> None:
    ranks = make_ranks(2)
    first, second = ranks.ranks
    second.process.kill()
    second.process.join()
    assert second.process.exitcode == -signal.SIGKILL
    first.request(reduce_without_peer)
    assert "rank 1 ended" in first.answer()


def reduce_without_peer() -> str:
    try:
        tensor_model_parallel_all_reduce(torch.ones(4))
    except PeerLostError as error:
        return str(error)
    raise AssertionError("expected PeerLostError")
