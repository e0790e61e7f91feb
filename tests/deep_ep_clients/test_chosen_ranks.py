"""Dispatches without expert ids: tokens go to the ranks that `is_token_in_rank` names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import deep_ep  # noqa: E402

from proxyccl import ArgumentError, Communicator  # noqa: E402
from support.cases.deep_ep_clients import Mixture, quantized  # noqa: E402
from support.cases.deep_ep_oracle import Arrived, same  # noqa: E402
from support.devices import ON_HOST, runtime_with_blocks, torch_device  # noqa: E402
from support.ranks import Ranks  # noqa: E402
from support.running import run_ranks  # noqa: E402

WORLDS: list[tuple[int, dict[str, int]]] = [(2, {}), (3, {}), (4, {"local_world_size": 2})]
WORST = 60


@dataclass(frozen=True)
class Sent:
    """A rank's buffer and tokens, and the layout with which the rank sends the tokens."""

    buffer: Any
    mixture: Mixture
    layout: dict[str, Any]

    @staticmethod
    def of(comm: Communicator, **options: Any) -> Sent:
        buffer, mixture = deep_ep.Buffer(comm, **options), Mixture.of(comm.rank, comm.world_size, torch_device(comm))
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(mixture.ids, mixture.experts)
        layout = {
            "num_tokens_per_rank": per_rank,
            "num_tokens_per_rdma_rank": per_node,
            "is_token_in_rank": in_rank,
            "num_tokens_per_expert": per_expert,
        }
        return Sent(buffer, mixture, layout)

    def dispatch(self, x: Any = None, **options: Any) -> Any:
        return self.buffer.dispatch(self.mixture.tokens if x is None else x, **self.layout, **options)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("float8", [False, True])
def test_rows_counts_and_sums(ranks: Ranks, *, float8: bool, asynchronous: bool) -> None:
    def body(comm: Communicator) -> None:
        sent, arrived = Sent.of(comm), Arrived.at(comm)
        pair = quantized if float8 else lambda tokens: tokens
        tokens = pair(sent.mixture.tokens)
        options: dict[str, Any] = {"async_finish": asynchronous}
        if asynchronous:
            options["previous_event"] = sent.buffer.capture()

        def check(received: Any) -> None:
            got, expected = received, pair(arrived.tokens)
            for value, wanted in zip(*((got, expected) if float8 else ((got,), (expected,))), strict=True):
                same(value, wanted)

        received, ids, weights, per_expert, handle, event = sent.dispatch(
            tokens, expert_alignment=4, config=deep_ep.Config(8, 8, 256), **options
        )
        if asynchronous:
            event.current_stream_wait()
        assert (ids, weights) == (None, None)
        assert per_expert == [-(-count // 4) * 4 for count in arrived.per_expert]
        check(received)
        again, *nothing, event = sent.buffer.dispatch(tokens, handle=handle, **options)
        if asynchronous:
            event.current_stream_wait()
        assert nothing == [None] * 4
        check(again)
        combined, of_weights, event = sent.buffer.combine(arrived.tokens, handle, **options)
        if asynchronous:
            event.current_stream_wait()
        assert of_weights is None
        times = sent.layout["is_token_in_rank"].sum(1, keepdim=True)
        same(combined, (sent.mixture.tokens.float() * times).to(torch.bfloat16))
        with pytest.raises(ArgumentError, match=r"^topk_weights: can't be given with the handle of a dispatch without"):
            sent.buffer.combine(arrived.tokens, handle, topk_weights=torch.ones(len(arrived.tokens), 4))

    ranks.run(body)


def test_worst_tokens(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        sent, rows = Sent.of(comm), Arrived.at(comm).tokens
        worst = {"num_worst_tokens": WORST * comm.world_size}
        received, ids, weights, per_expert, handle, _ = sent.dispatch(**worst)
        assert (ids, weights, per_expert) == (None, None, [])
        assert len(received) == len(handle.recv_src_idx) == WORST * comm.world_size
        same(received[: len(rows)], rows)
        again, *_ = sent.buffer.dispatch(sent.mixture.tokens, handle=handle, **worst)
        same(again[: len(rows)], rows)
        times = sent.layout["is_token_in_rank"].sum(1, keepdim=True)
        same(sent.buffer.combine(received, handle)[0], (sent.mixture.tokens.float() * times).to(torch.bfloat16))

    ranks.run(body)


def test_counts_are_what_the_ranks_say() -> None:
    """Tokens may choose different numbers of experts on a rank, so the counts can't be derived from the rows."""

    def body(comm: Communicator) -> None:
        sent = Sent.of(comm)
        said = torch.arange(8, dtype=torch.int32, device=torch_device(comm)) * (comm.rank + 1)
        sent.layout["num_tokens_per_expert"] = said
        assert sent.dispatch()[3] == [3 * (4 * comm.rank + expert) for expert in range(4)]
        sent.layout["num_tokens_per_expert"] = said[:7]
        with pytest.raises(ArgumentError, match=r"^num_tokens_per_expert: has 7 experts; expected a multiple of 2"):
            sent.dispatch()

    run_ranks(2, body, make_runtime=runtime_with_blocks)


@pytest.mark.host_only(reason="more ranks than most machines have GPUs")
def test_a_token_goes_to_at_most_sixteen_ranks() -> None:
    def body(comm: Communicator) -> None:
        buffer, per_expert = deep_ep.Buffer(comm), torch.ones(17, dtype=torch.int32)
        goes = torch.ones(3, 17, dtype=torch.bool)
        goes[:, comm.rank] = comm.rank == 5  # one token of rank 5 goes to 17 ranks
        goes[:2, 0] = False
        x = torch.full((3, 16), comm.rank + 1, dtype=torch.bfloat16)
        layout = {"num_tokens_per_expert": per_expert}
        with pytest.raises(ArgumentError, match=r"^is_token_in_rank: names more than 16 ranks"):
            buffer.dispatch(x, is_token_in_rank=goes, **layout)
        goes[:, comm.rank] = False
        received, _, _, counts, handle, _ = buffer.dispatch(x, is_token_in_rank=goes, **layout)
        assert counts == [17]
        assert len(received) == (3 * 16 if comm.rank else 16)
        same(buffer.combine(received, handle)[0], x * goes.sum(1, keepdim=True))

    run_ranks(17, body, make_runtime=runtime_with_blocks)


@pytest.mark.skipif(not ON_HOST, reason="more ranks than most machines have GPUs")
def test_tokens_of_a_lost_rank_stay_here() -> None:
    def body(comm: Communicator) -> None:
        sent = Sent.of(comm, enable_shrink=True)
        sent.dispatch()
        if comm.rank == 1:
            return
        sent.buffer.low_latency_update_mask_buffer(1, mask=True)
        _, _, _, per_expert, handle, _ = sent.dispatch()
        everyone = [Mixture.of(rank, 3).ids for rank in (0, 2)]
        assert per_expert == [
            sum(int((ids == 4 * comm.rank + expert).sum()) for ids in everyone) for expert in range(4)
        ]
        assert all(len(entry) for entry in handle)
        sent.buffer.communicator.close()

    run_ranks(3, body, make_runtime=runtime_with_blocks)
