"""The entries of a handle in normal mode, compared with DeepEP's definitions, which this file writes as plain loops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import deep_ep  # noqa: E402

from proxyccl import Communicator  # noqa: E402
from support.cases.deep_ep_clients import Mixture  # noqa: E402
from support.cases.deep_ep_oracle import Arrived  # noqa: E402
from support.devices import ON_HOST, runtime_with_blocks, torch_device  # noqa: E402
from support.ranks import Ranks  # noqa: E402
from support.running import run_ranks  # noqa: E402

RANKS = 3 if ON_HOST else 2
CHANNELS = 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(RANKS, make_runtime=runtime_with_blocks) as made:
        yield made


def goes_to(mixture: Mixture, ranks: int = RANKS) -> list[list[bool]]:
    """Returns [T][ranks]: whether a token has an expert on a rank."""
    per_rank = mixture.experts // ranks
    return [[any(e >= 0 and e // per_rank == r for e in token) for r in range(ranks)] for token in mixture.ids.tolist()]


def channel_of(token: int, tokens: int) -> int:
    return token // -(-tokens // CHANNELS)


def sent_before(goes: list[list[bool]], rank: int, channel: int) -> int:
    """Returns how many tokens of earlier channels go to a rank."""
    return sum(token[rank] for number, token in enumerate(goes) if channel_of(number, len(goes)) < channel)


def head_of(goes: list[list[bool]], number: int, rank: int) -> int:
    """Returns how many earlier tokens of the same channel as token `number` go to a rank."""
    return sum(earlier[rank] for earlier in goes[:number]) - sent_before(goes, rank, channel_of(number, len(goes)))


@pytest.mark.parametrize("worst", [0, 90])
@pytest.mark.parametrize("with_ids", [False, True])
def test_entries(ranks: Ranks, *, with_ids: bool, worst: int) -> None:
    def body(comm: Communicator) -> None:
        everyone = [goes_to(Mixture.of(rank, RANKS)) for rank in range(RANKS)]
        goes, rank = everyone[comm.rank], comm.rank
        buffer, mixture = deep_ep.Buffer(comm), Mixture.of(comm.rank, RANKS, torch_device(comm))
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(mixture.ids, mixture.experts)
        options: dict[str, Any] = {"topk_idx": mixture.ids, "topk_weights": mixture.weights} if with_ids else {}
        *_, handle, _ = buffer.dispatch(
            mixture.tokens,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            num_worst_tokens=worst,
            config=deep_ep.Config(2 * CHANNELS),
            **options,
        )
        rank_prefix, channel_prefix, recv_channel_prefix, recv_src_idx, is_token_in_rank, send_head = handle
        rows_between = [[sum(token[to] for token in source) for to in range(RANKS)] for source in everyone]
        assert rank_prefix.tolist() == [
            [sum(rows_between[source][to] for source in range(end)) for to in range(RANKS)]
            for end in range(1, RANKS + 1)
        ]
        assert channel_prefix.tolist() == [
            [sent_before(goes, to, channel + 1) for channel in range(CHANNELS)] for to in range(RANKS)
        ]
        assert recv_channel_prefix.tolist() == [
            [sent_before(source, rank, channel) for channel in range(CHANNELS)] for source in everyone
        ]
        numbers = Arrived.at(comm).numbers
        assert recv_src_idx[: len(numbers)].tolist() == numbers.tolist()
        assert len(recv_src_idx) == (worst or len(numbers))
        assert is_token_in_rank is in_rank
        assert send_head.tolist() == [
            [head_of(goes, number, to) if token[to] else -1 for to in range(RANKS)] for number, token in enumerate(goes)
        ]
        assert send_head.shape == (len(goes), RANKS)
        entries = (rank_prefix, channel_prefix, recv_channel_prefix, recv_src_idx, send_head)
        assert {entry.dtype for entry in entries} == {torch.int32}
        assert all(entry.is_contiguous() for entry in entries)

    ranks.run(body)


@pytest.mark.host_only(reason="more ranks than most machines have GPUs")
def test_entries_across_nodes() -> None:
    ranks, local = 4, 2

    def body(comm: Communicator) -> None:
        everyone = [goes_to(Mixture.of(rank, ranks), ranks) for rank in range(ranks)]
        goes, rank = everyone[comm.rank], comm.rank
        to_nodes = [[[any(token[node * local :][:local]) for node in range(2)] for token in each] for each in everyone]
        buffer, mixture = deep_ep.Buffer(comm), Mixture.of(comm.rank, ranks)
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(mixture.ids, mixture.experts)
        *_, handle, _ = buffer.dispatch(
            mixture.tokens,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            config=deep_ep.Config(2 * CHANNELS),
        )
        assert len(handle) == 10
        assert handle[0] is in_rank
        rdma, of_ranks, recv_rdma, recv_nodes, recv_ranks, recv_sums, _, rdma_head, _ = handle[1:]
        channels, nodes = range(CHANNELS), range(ranks // local)
        own = to_nodes[rank]
        assert rdma.tolist() == [[sent_before(own, node, channel + 1) for channel in channels] for node in nodes]
        assert of_ranks.tolist() == [
            [sent_before(goes, to, channel + 1) for channel in channels] for to in range(ranks)
        ]
        assert rdma_head.tolist() == [
            [head_of(own, number, node) if token[node] else -1 for node in nodes] for number, token in enumerate(own)
        ]
        counterparts = [to_nodes[node * local + rank % local] for node in nodes]
        here = rank // local
        assert recv_rdma.tolist() == [
            [sent_before(each, here, channel + 1) for channel in channels] for each in counterparts
        ]
        came = [sum(token[here] for token in each) for each in counterparts]
        assert recv_nodes.tolist() == [came[0], sum(came)]
        rows = [sum(token[rank] for token in each) for each in everyone]
        assert recv_sums.tolist() == [sum(rows[: end + 1]) for end in range(ranks)]
        assert recv_ranks.tolist() == [
            [sum(rows[:source]) + sent_before(everyone[source], rank, channel) for channel in channels]
            for source in range(ranks)
        ]

    run_ranks(ranks, body, make_runtime=runtime_with_blocks, local_world_size=local)
