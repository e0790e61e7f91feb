"""Repeated calls of a buffer: each kind of call is prepared once, and each call notices changed arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import deep_ep  # noqa: E402

from proxyccl import Communicator, EPAll2AllLayer  # noqa: E402
from proxyccl.channels.expert_parallel.call_form import CallForm  # noqa: E402
from proxyccl.deep_ep import layers  # noqa: E402
from proxyccl.device.errors import ArgumentError, ClosedError, MismatchError  # noqa: E402
from support.cases.deep_ep_clients import dequantized  # noqa: E402
from support.devices import runtime_with_blocks, torch_device  # noqa: E402
from support.ranks import Ranks  # noqa: E402
from support.running import run_ranks  # noqa: E402

TOKENS, HIDDEN, TOPK, EXPERTS = 8, 256, 2, 4


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, make_runtime=runtime_with_blocks) as made:
        yield made


class Batch:
    """A rank's tokens, with experts that return their rows unchanged, and the expected result."""

    def __init__(self, comm: Communicator, seed: int, tokens: int = TOKENS) -> None:
        made, device = torch.Generator().manual_seed(2 * seed + comm.rank), torch_device(comm)
        self.x = torch.randint(-8, 8, (tokens, HIDDEN), generator=made).to(torch.bfloat16).to(device)
        order = torch.rand(tokens, EXPERTS, generator=made).argsort(1)[:, :TOPK]
        self.ids = order.contiguous().to(device)
        self.weights = torch.randint(1, 4, (tokens, TOPK), generator=made).float().to(device)

    @property
    def weighted(self) -> Any:
        return (self.x.float() * self.weights.sum(1, keepdim=True)).to(torch.bfloat16)

    @property
    def by_rank(self) -> Any:
        visits = torch.stack([(self.ids // 2 == rank).any(1) for rank in range(2)], 1).sum(1, keepdim=True)
        return (self.x.float() * visits).to(torch.bfloat16)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list to which the name of each call that is prepared from now on is added."""
    names: list[str] = []
    start = CallForm.__init__

    def noted(form: CallForm, parts: Any, arrays: Any, name: str, *others: Any) -> None:
        names.append(name.partition("_")[0])
        start(form, parts, arrays, name, *others)

    monkeypatch.setattr(CallForm, "__init__", noted)
    return names


@pytest.mark.parametrize("how", ["", "async_finish", "return_recv_hook"])
@pytest.mark.parametrize("use_fp8", [False, True])
def test_low_latency_calls_with_other_numbers_of_tokens(
    ranks: Ranks, prepared: list[str], use_fp8: bool, how: str
) -> None:
    chosen: dict[str, Any] = {how: True} if how else {}
    hooked = how == "return_recv_hook"

    def body(comm: Communicator) -> None:
        buffer = deep_ep.Buffer(comm, explicitly_destroy=True)
        for turn, tokens in enumerate((TOKENS, TOKENS, 3, comm.rank, TOKENS)):
            batch = Batch(comm, turn, tokens)
            stats = torch.zeros(2, dtype=torch.int32, device=batch.x.device)
            rows, counts, handle, event, hook = buffer.low_latency_dispatch(
                batch.x, batch.ids, TOKENS, EXPERTS, stats, use_fp8=use_fp8, **chosen
            )
            end(event, hook)
            assert torch.equal(stats, counts)
            assert len(handle) == 5
            assert handle[2:] == (TOKENS, HIDDEN, EXPERTS)
            if use_fp8:
                values, scales = rows
                assert scales.stride(-2) == 1
                groups = values.float().view(*values.shape[:-1], scales.shape[-1], -1) * scales.unsqueeze(-1)
                rows = groups.view(values.shape).to(torch.bfloat16)
            combined, event, hook = buffer.low_latency_combine(rows, batch.ids, batch.weights, handle, **chosen)
            end(event, hook)
            torch.testing.assert_close(combined.float(), batch.weighted.float(), rtol=0.07, atol=0.6)
            if not use_fp8:
                assert torch.equal(combined, batch.weighted)
        buffer.destroy()

    def end(event: deep_ep.utils.EventOverlap, hook: Any) -> None:
        assert (event.event is not None) == (how == "async_finish")
        assert (hook is not None) == hooked
        if event.event is not None:
            event.current_stream_wait()
        if hook is not None:
            hook()

    ranks.run(body)
    layers = 2 if hooked else 1
    assert sorted(prepared) == ["combine"] * 2 * layers + ["dispatch"] * 2 * layers


@pytest.mark.parametrize("worst", [0, 2 * TOKENS])
def test_calls_of_normal_mode_while_their_outputs_live(ranks: Ranks, prepared: list[str], worst: int) -> None:
    def body(comm: Communicator) -> None:
        buffer = deep_ep.Buffer(comm, explicitly_destroy=True)
        batches = [Batch(comm, turn, TOKENS - turn % 3) for turn in range(5)]
        sent = []
        for batch in batches:  # the batches' outputs need more memory than the layer has
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(batch.ids, EXPERTS)
            rows, ids, weights, counts, handle, _ = buffer.dispatch(
                batch.x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=batch.ids,
                topk_weights=batch.weights,
                num_worst_tokens=worst,
            )
            assert counts == ([] if worst else [int((ids == expert).sum()) for expert in range(2)])
            assert len(rows) == len(ids) == len(weights)
            assert worst or bool((ids >= 0).any(1).all())
            sent.append((rows, handle))
        for batch, (rows, handle) in zip(batches, sent, strict=True):
            assert torch.equal(buffer.combine(rows, handle)[0], batch.by_rank)
            assert torch.equal(buffer.combine(rows.clone(), handle)[0], batch.by_rank)
        buffer.destroy()

    ranks.run(body)
    assert sorted(prepared) == ["combine"] * 2 + ["dispatch with weights"] * 2


def test_what_a_call_refuses(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer, batch = deep_ep.Buffer(comm, explicitly_destroy=True), Batch(comm, 0)

        def sent(x: Any, ids: Any) -> Any:
            return buffer.low_latency_dispatch(x, ids, TOKENS, EXPERTS, use_fp8=False)

        for _ in range(2):
            rows, _, handle, _, _ = sent(batch.x, batch.ids)
            buffer.low_latency_combine(rows, batch.ids, batch.weights, handle)
        wide = torch.cat([batch.x, batch.x])
        strided, freed = torch.cat([batch.x, batch.x], 1)[:, :HIDDEN], batch.x.clone()
        freed.untyped_storage().resize_(0)
        cut = batch.x.clone()
        cut.untyped_storage().resize_(cut.nbytes - 1)
        for x, ids, argument in (
            (wide, torch.cat([batch.ids, batch.ids]), "x"),
            (strided, batch.ids, "x"),
            (freed, batch.ids, "x"),
            (cut, batch.ids, "x"),
            (torch._neg_view(batch.x), batch.ids, "x"),
            (batch.x, batch.ids.t().contiguous().t(), "topk_idx"),
            (batch.x.float(), batch.ids, "x"),
            (batch.x, batch.ids[1:], "topk_idx"),
            (batch.x, batch.ids.float(), "topk_idx"),
        ):
            with pytest.raises(ArgumentError) as refused:
                sent(x, ids)
            assert refused.value.argument == argument
        for rows_given, weights, argument in (
            (rows[:, 1:], batch.weights, "x"),
            (rows, batch.weights[1:], "topk_weights"),
            (rows, batch.weights.double(), "topk_weights"),
        ):
            with pytest.raises(ArgumentError) as refused:
                buffer.low_latency_combine(rows_given, batch.ids, weights, handle)
            assert refused.value.argument == argument
        with pytest.raises(ArgumentError, match=r"^out: overlaps"):
            buffer.low_latency_combine(rows, batch.ids, batch.weights, handle, out=rows[0, :TOKENS])
        combined, _, _ = buffer.low_latency_combine(rows, batch.ids, batch.weights, handle)
        assert torch.equal(combined, batch.weighted)
        _, _, under_way, _, hook = buffer.low_latency_dispatch(
            batch.x, batch.ids, TOKENS, EXPERTS, use_fp8=False, return_recv_hook=True
        )
        with pytest.raises(ArgumentError, match=r"^handle: its dispatch was not received"):
            buffer.low_latency_combine(rows, batch.ids, batch.weights, under_way)
        hook()
        buffer.destroy()
        with pytest.raises(ClosedError):
            sent(batch.x, batch.ids)

    ranks.run(body)


@pytest.mark.parametrize("hooked", [False, True], ids=["", "return_recv_hook"])
def test_the_most_tokens_may_vary_within_the_same_memory(hooked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers may pass another maximum number of tokens in each step, but ranks that pass different maxima get an
    error.
    """
    made: list[int] = []

    def noted(communicator: Communicator, max_tokens: int, **options: Any) -> EPAll2AllLayer:
        made.append(max_tokens)
        return EPAll2AllLayer(communicator, max_tokens, **options)

    monkeypatch.setattr(layers, "EPAll2AllLayer", noted)

    def body(comm: Communicator) -> None:
        buffer = deep_ep.Buffer(comm)

        def step(tokens: int, most: int, *, float8: bool = False) -> None:
            batch = Batch(comm, most, tokens)
            rows, counts, handle, _, hook = buffer.low_latency_dispatch(
                batch.x, batch.ids, most, EXPERTS, use_fp8=float8, return_recv_hook=hooked
            )
            if hook is not None:
                hook()
            if float8:
                assert rows[1].stride()[1:] == (1, -(-2 * most // 4) * 4)
                rows = dequantized(rows[0], rows[1].contiguous()).to(torch.bfloat16)
            assert rows.shape == (EXPERTS // 2, 2 * most, HIDDEN)
            assert handle[0].shape == rows.shape[:2]
            assert (handle[1] & 0xFFFFFFFF).sum(1).tolist() == counts.tolist()
            combined, _, hook = buffer.low_latency_combine(
                rows, batch.ids, batch.weights, handle, return_recv_hook=hooked
            )
            if hook is not None:
                hook()
            torch.testing.assert_close(combined, batch.weighted, rtol=0.07 if float8 else 0, atol=2 if float8 else 0)

        for float8 in (False, True):
            for most in (1, 2, 3, 5, 7, 6, 9, 17, 12, 1, 18):
                step(most, most, float8=float8)
                step(most - comm.rank * (most // 2), most, float8=float8)
                step(most * comm.rank, most, float8=float8)
        with pytest.raises(ArgumentError, match=r"^x: has 5 tokens; expected at most num_max_dispatch"):
            step(5, 4)

        def differ() -> None:
            batch = Batch(comm, 1, 1)
            *_, hook = buffer.low_latency_dispatch(batch.x, batch.ids, 7 + comm.rank, EXPERTS, return_recv_hook=hooked)
            if hook is not None:
                hook()
            comm.synchronize()

        with pytest.raises(MismatchError) as caught:
            differ()
        assert caught.value.argument == "count"

    run_ranks(2, body, make_runtime=runtime_with_blocks)
    of_a_rank = [1, 2, 4, 8, 16, 32]
    assert sorted(made) == sorted(2 * 2 * (1 + hooked) * of_a_rank)
