"""DeepEP 1.2.1's interface: signatures, shapes, types and values of each call, and refusals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import deep_ep  # noqa: E402

from proxyccl import (  # noqa: E402
    AbortedError,
    ArgumentError,
    ClosedError,
    Communicator,
    CommunicatorError,
    ThreadBootstrap,
)
from support.cases.deep_ep_clients import Mixture, dequantized, quantized  # noqa: E402
from support.cases.deep_ep_oracle import Arrived, same, signature  # noqa: E402
from support.devices import ON_HOST, runtime_with_blocks, torch_device  # noqa: E402
from support.ranks import Ranks  # noqa: E402
from support.running import TIMEOUT, run_ranks, wait_for  # noqa: E402

RANKS, PER_RANK, HIDDEN = 3 if ON_HOST else 2, 4, 1024
SIGNATURES = {
    "__init__": "group num_nvl_bytes=0 num_rdma_bytes=0 low_latency_mode=False num_qps_per_rank=24 "
    "allow_nvlink_for_low_latency_mode=True allow_mnnvl=False use_fabric=False explicitly_destroy=False "
    "enable_shrink=False comm=None",
    "get_dispatch_layout": "topk_idx num_experts previous_event=None async_finish=False allocate_on_comm_stream=False",
    "dispatch": "x handle=None num_tokens_per_rank=None num_tokens_per_rdma_rank=None is_token_in_rank=None "
    "num_tokens_per_expert=None topk_idx=None topk_weights=None expert_alignment=1 num_worst_tokens=0 config=None "
    "previous_event=None async_finish=False allocate_on_comm_stream=False",
    "combine": "x handle topk_weights=None bias=None config=None previous_event=None async_finish=False "
    "allocate_on_comm_stream=False",
    "clean_low_latency_buffer": "num_max_dispatch_tokens_per_rank hidden num_experts",
    "low_latency_dispatch": "x topk_idx num_max_dispatch_tokens_per_rank num_experts "
    "cumulative_local_expert_recv_stats=None dispatch_wait_recv_cost_stats=None use_fp8=True round_scale=False "
    "use_ue8m0=False async_finish=False return_recv_hook=False use_nvfp4=False x_global_scale=None",
    "low_latency_combine": "x topk_idx topk_weights handle use_logfmt=False zero_copy=False async_finish=False "
    "return_recv_hook=False out=None combine_wait_recv_cost_stats=None overlap=False packed_recv_count=None "
    "comp_signal=None block_m=64 threshold=0 num_sms=None src_signals=None src_signal_expect_value=0",
    "low_latency_update_mask_buffer": "rank_to_mask mask=False",
    "low_latency_query_mask_buffer": "mask_status",
    "low_latency_clean_mask_buffer": "",
    "get_next_low_latency_combine_buffer": "handle",
    "get_local_buffer_tensor": "dtype size=None offset=0 use_rdma_buffer=False",
    "get_low_latency_rdma_size_hint": "num_max_dispatch_tokens_per_rank hidden num_ranks num_experts",
    "get_dispatch_config": "num_ranks",
    "get_combine_config": "num_ranks",
    "set_num_sms": "new_num_sms",
    "capture": "",
    "get_comm_stream": "",
    "destroy": "",
    "is_sm90_compiled": "",
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(RANKS, make_runtime=runtime_with_blocks) as made:
        yield made


def dispatched(buffer: Any, mixture: Mixture, x: Any = None, **options: Any) -> tuple[Any, ...]:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(mixture.ids, mixture.experts)
    return buffer.dispatch(
        mixture.tokens if x is None else x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        topk_idx=mixture.ids,
        topk_weights=mixture.weights,
        **options,
    )


def mixture_of(comm: Communicator) -> Mixture:
    return Mixture.of(comm.rank, comm.world_size, torch_device(comm))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    assert signature(getattr(deep_ep.Buffer, name)) == SIGNATURES[name]


def test_names_and_configs() -> None:
    assert deep_ep.topk_idx_t is torch.int64
    assert deep_ep.utils.EventOverlap is deep_ep.EventOverlap
    config = deep_ep.Config(20, 6, 256, 6, 128)
    assert config == deep_ep.Config(num_sms=20, num_max_rdma_chunked_recv_tokens=128)
    assert config.get_nvl_buffer_size_hint(14336, 8) % 128 == 0
    assert config.get_rdma_buffer_size_hint(14336, 8) == 0 < config.get_rdma_buffer_size_hint(14336, 16)
    assert deep_ep.Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 256) > 8 * 128 * 7168 * 2
    with deep_ep.Buffer.capture() as event:
        event.current_stream_wait()
    with pytest.raises(ValueError, match="async_finish"):
        deep_ep.EventOverlap().current_stream_wait()


def test_the_layout_of_a_dispatch(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer, mixture = deep_ep.Buffer(comm), mixture_of(comm)
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(mixture.ids, mixture.experts)
        expected = torch.stack([(mixture.ids // PER_RANK == rank) & (mixture.ids >= 0) for rank in range(RANKS)], 1)
        same(in_rank, expected.any(2))
        same(per_rank, in_rank.sum(0).to(torch.int32))
        same(per_expert, torch.bincount(mixture.ids[mixture.ids >= 0], minlength=mixture.experts).to(torch.int32))
        assert per_node is None
        assert event.event is None

    ranks.run(body)


def test_what_a_dispatch_gives(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer, mixture = deep_ep.Buffer(comm), mixture_of(comm)
        arrived = Arrived.at(comm)
        rows, ids, tokens = arrived.tokens, arrived.ids, arrived.numbers
        received, row_ids, weights, per_expert, handle, _ = dispatched(buffer, mixture, expert_alignment=4)
        same(received, rows)
        same(row_ids, ids)
        assert per_expert == [-(-int((ids == expert).sum()) // 4) * 4 for expert in range(PER_RANK)]
        assert (weights[ids < 0] == 0).all()
        prefixes, _, _, sources, in_rank, _ = handle
        assert prefixes[:, comm.rank].tolist() == arrived.sources.bincount(minlength=RANKS).cumsum(0).tolist()
        same(sources, tokens)
        assert in_rank.shape == (len(mixture.tokens), RANKS)

        # Dispatch different values with the same handle, then return the weights to their source ranks.
        again, *nothing, _ = buffer.dispatch(2 * mixture.tokens, handle=handle)
        same(again, 2 * rows)
        assert nothing == [None] * 4
        combined, back, _ = buffer.combine(received, handle, topk_weights=weights)
        same(back, torch.where(mixture.ids >= 0, mixture.weights, 0))
        times = in_rank.sum(1, keepdim=True).float()
        same(combined, (mixture.tokens.float() * times).to(torch.bfloat16))
        bias = torch.full_like(mixture.tokens, 0.3)
        once = (bias.float() + mixture.tokens.float() * times).to(torch.bfloat16)  # rounded once
        same(buffer.combine(received, handle, bias=(bias, None))[0], once)
        same(buffer.combine(received, handle, bias=bias)[0], once)

    ranks.run(body)


@pytest.mark.parametrize("scales", ["of 128", "of a row", "packed", "padded"])
def test_float8_pairs(ranks: Ranks, scales: str) -> None:
    def body(comm: Communicator) -> None:
        buffer, mixture = deep_ep.Buffer(comm), mixture_of(comm)

        def pair(tokens: Any) -> tuple[Any, Any]:
            values, of_groups = quantized(tokens)
            if scales == "packed":
                return values, of_groups.view(torch.int32)[:, ::4].t().contiguous().t()
            if scales == "padded":  # with padding, a block's size does not follow from the number of scales
                return values, torch.cat([of_groups, of_groups[:, :3]], 1)
            return values, of_groups if scales == "of 128" else of_groups[:, 0].contiguous()

        expected = pair(Arrived.at(comm).tokens)
        (rows, got), _, _, _, handle, _ = dispatched(buffer, mixture, pair(mixture.tokens))
        same(rows.view(torch.uint8), expected[0].view(torch.uint8))
        same(got, expected[1])
        (rows, got), *_ = buffer.dispatch(pair(mixture.tokens), handle=handle)
        same(got, expected[1])

    ranks.run(body)


def test_worst_tokens_need_no_wait(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer, mixture = deep_ep.Buffer(comm), mixture_of(comm)
        rows, ids = Arrived.at(comm).tokens, Arrived.at(comm).ids
        received, row_ids, _, per_expert, handle, _ = dispatched(buffer, mixture, num_worst_tokens=60)
        assert per_expert == []
        assert received.shape == (60, HIDDEN)
        same(received[: len(rows)], rows)
        same(row_ids, torch.cat([ids, torch.full_like(ids[:1], -1).expand(60 - len(ids), -1)]))
        times = handle[4].sum(1, keepdim=True).float()
        same(buffer.combine(received, handle)[0], (mixture.tokens.float() * times).to(torch.bfloat16))

    ranks.run(body)


def test_worst_tokens_have_room_for_the_share_of_each_rank(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer, most = deep_ep.Buffer(comm), 200
        for tokens in (5, most):
            x = torch.full((tokens, 16), float(tokens), dtype=torch.bfloat16, device=torch_device(comm))
            ids, weights = x[:, :1].long() * 0, x[:, :1].float() * 0 + 1
            received, row_ids, *_ = dispatched(
                buffer, Mixture(x, ids, weights, RANKS, tokens), num_worst_tokens=most * RANKS
            )
            assert int((row_ids >= 0).sum()) == (RANKS * tokens if comm.rank == 0 else 0)
            assert comm.rank or (received[: RANKS * tokens] == tokens).all()

    ranks.run(body)


def test_calls_between_nodes_take_no_worst_tokens(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer, mixture, config = deep_ep.Buffer(comm), mixture_of(comm), deep_ep.Config(20)
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(mixture.ids, mixture.experts)
        layout = per_rank, per_node, in_rank, per_expert, mixture.ids, mixture.weights
        rows, *_, counts, handle, event = buffer.internode_dispatch(
            mixture.tokens, None, *layout, 4, config, None, True, False
        )
        event.current_stream_wait()
        same(rows, Arrived.at(comm).tokens)
        assert all(count % 4 == 0 for count in counts)
        combined, _, event = buffer.internode_combine(rows, handle, None, mixture.tokens, config, None, True, False)
        event.current_stream_wait()
        times = 1 + in_rank.sum(1, keepdim=True).float()
        same(combined, (mixture.tokens.float() * times).to(torch.bfloat16))

    ranks.run(body)


def test_a_later_call_may_bring_more_tokens(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer = deep_ep.Buffer(comm)
        handles = []
        for tokens in (5, 200 if comm.rank == 1 else 5, 7):
            x = torch.full((tokens, 16), float(tokens), dtype=torch.bfloat16, device=torch_device(comm))
            ids, weights = x[:, :1].long() * 0, x[:, :1].float() * 0 + 1
            mixture = Mixture(x, ids, weights, RANKS, tokens)
            received, _, _, per_expert, handle, _ = dispatched(buffer, mixture)
            handles.append((received, handle, x))
            assert len(received) == sum(per_expert)
        for received, handle, x in handles:  # handles from before the layer grew are still valid
            same(buffer.combine(received, handle)[0], x)

    ranks.run(body)


def test_low_latency(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer, mixture = deep_ep.Buffer(comm, low_latency_mode=True), mixture_of(comm)
        device, most = mixture.tokens.device, mixture.most_tokens
        stats = torch.ones(PER_RANK, dtype=torch.int32, device=device)
        everyone = [Mixture.of(rank, RANKS, device) for rank in range(RANKS)]
        arguments = mixture.tokens, mixture.ids, most, mixture.experts
        for rounded in (False, True):
            (rows, scales), counts, handle, event, hook = buffer.low_latency_dispatch(
                *arguments, stats, round_scale=rounded, return_recv_hook=True
            )
            assert event.event is None
            hook()
            assert rows.shape == (PER_RANK, RANKS * most, HIDDEN)
            assert scales.shape == (PER_RANK, RANKS * most, HIDDEN // 128)
            column = -(-RANKS * most // 4) * 4  # a column's size is rounded up to 16 bytes
            assert scales.stride() == (column * HIDDEN // 128, 1, column)
            sources, ranges, *sizes = handle
            assert sizes == [most, HIDDEN, mixture.experts]
            for local in range(PER_RANK):
                came = [(each.ids == comm.rank * PER_RANK + local).any(1) for each in everyone]
                expected = torch.cat([each.tokens[token] for each, token in zip(everyone, came, strict=True)])
                count = int(counts[local])
                assert count == len(expected)
                values = dequantized(rows[local, :count], scales[local, :count].contiguous())
                torch.testing.assert_close(values, expected.float(), rtol=0.07, atol=0.02)
                assert sources[local, :count].tolist() == torch.cat([t.nonzero().flatten() for t in came]).tolist()
                assert (ranges[local] & 0xFFFFFFFF).tolist() == [int(token.sum()) for token in came]
                if rounded:
                    assert (torch.frexp(scales[local, :count]).mantissa == 0.5).all()
        assert stats.tolist() == (1 + 2 * counts).tolist()

        rows, counts, handle, _, _ = buffer.low_latency_dispatch(*arguments, use_fp8=False)
        given = buffer.get_next_low_latency_combine_buffer(handle)
        given[:] = 2 * rows
        combined, _, hook = buffer.low_latency_combine(
            given, mixture.ids, mixture.weights, handle, zero_copy=True, use_logfmt=True, return_recv_hook=True
        )
        hook()
        factors = torch.where(mixture.ids >= 0, mixture.weights, 0).sum(1, keepdim=True)
        torch.testing.assert_close(combined.float(), 2 * mixture.tokens.float() * factors, rtol=0.02, atol=0.02)
        status = torch.ones(RANKS, dtype=torch.int32, device=device)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0] * RANKS

    ranks.run(body)


def test_two_batches_are_under_way(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer, mixture = deep_ep.Buffer(comm), mixture_of(comm)
        factors = torch.where(mixture.ids >= 0, mixture.weights, 0).sum(1, keepdim=True)
        arguments = mixture.ids, mixture.most_tokens, mixture.experts
        for _ in range(2):
            batches = [times * mixture.tokens for times in (1, 2)]
            sent = [buffer.low_latency_dispatch(x, *arguments, use_fp8=False, return_recv_hook=True) for x in batches]
            for *_, hook in sent:
                hook()
            returned = [
                buffer.low_latency_combine(rows, mixture.ids, mixture.weights, handle, return_recv_hook=True)
                for rows, _, handle, _, _ in sent
            ]
            for (combined, _, hook), x in zip(returned, batches, strict=True):
                hook()
                torch.testing.assert_close(combined.float(), x.float() * factors, rtol=0.02, atol=0.02)

    ranks.run(body)


def test_batches_under_way_have_tensors_of_their_own_for_results(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer, mixture = deep_ep.Buffer(comm), mixture_of(comm)
        factors = torch.where(mixture.ids >= 0, mixture.weights, 0).sum(1, keepdim=True)
        arguments = mixture.ids, mixture.most_tokens, mixture.experts
        batches = [times * mixture.tokens for times in (1, 2)]
        sent = [buffer.low_latency_dispatch(x, *arguments, use_fp8=False, return_recv_hook=True) for x in batches]
        returned = []
        for rows, _, handle, _, hook in sent:
            hook()
            results = buffer.get_next_low_latency_combine_buffer(handle)
            assert results is buffer.get_next_low_latency_combine_buffer(handle)
            results[:] = rows
            returned.append(
                buffer.low_latency_combine(
                    results, mixture.ids, mixture.weights, handle, zero_copy=True, return_recv_hook=True
                )
            )
        for (combined, _, hook), x in zip(returned, batches, strict=True):
            hook()
            torch.testing.assert_close(combined.float(), x.float() * factors, rtol=0.02, atol=0.02)

    ranks.run(body)


@pytest.mark.host_only(reason="more ranks than most machines have GPUs")
def test_a_masked_rank_takes_no_part_from_the_next_dispatch_on() -> None:
    def body(comm: Communicator) -> None:
        buffer, mixture = deep_ep.Buffer(comm, enable_shrink=True), mixture_of(comm)
        arguments = (mixture.tokens, mixture.ids, mixture.most_tokens, mixture.experts)
        _, _, old, _, _ = buffer.low_latency_dispatch(*arguments, use_fp8=False)
        if comm.rank == 1:
            return
        buffer.low_latency_update_mask_buffer(2 - comm.rank, mask=True)
        buffer.low_latency_clean_mask_buffer()
        buffer.low_latency_update_mask_buffer(1, mask=True)
        status = torch.zeros(3, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0, 1, 0]
        rows, _, handle, _, _ = buffer.low_latency_dispatch(*arguments, use_fp8=False)
        with pytest.raises(ArgumentError, match=r"^handle: comes from a dispatch before ranks were lost"):
            buffer.low_latency_combine(rows, mixture.ids, mixture.weights, old)
        combined, _, _ = buffer.low_latency_combine(rows, mixture.ids, mixture.weights, handle)
        left = (mixture.ids >= 0) & (mixture.ids // PER_RANK != 1)
        factors = torch.where(left, mixture.weights, 0).sum(1, keepdim=True)
        torch.testing.assert_close(combined.float(), mixture.tokens.float() * factors, rtol=0.02, atol=0.02)
        assert buffer.communicator.world_size == 2
        with pytest.raises(NotImplementedError, match="unmasking of lost ranks"):
            buffer.low_latency_update_mask_buffer(1, mask=False)
        with pytest.raises(NotImplementedError, match="unmasking of lost ranks"):
            buffer.low_latency_clean_mask_buffer()
        with pytest.raises(ArgumentError, match=r"^rank_to_mask: must be a rank from 0 to 2"):
            buffer.low_latency_update_mask_buffer(3, mask=True)
        with pytest.raises(ArgumentError, match=r"^rank_to_mask: .* is this rank"):
            buffer.low_latency_update_mask_buffer(comm.rank, mask=True)
        buffer.communicator.close()

    run_ranks(3, body, make_runtime=runtime_with_blocks)


@pytest.mark.host_only(reason="more ranks than most machines have GPUs")
@pytest.mark.parametrize("late", ["dispatch", "combine", "combine on the buffer's stream", "hook"])
def test_each_rank_learns_once_that_a_rank_is_lost_and_repeats_all_layers(late: str) -> None:
    """Rank 2 is lost while rank 1 waits in layer 1. Rank 0 makes the call `late` of layer 1 after the loss. Layer n
    multiplies by 10**n, so results show if two ranks dispatch in different layers.
    """
    complete = threading.Barrier(3)

    def body(comm: Communicator) -> None:
        buffer, x = deep_ep.Buffer(comm, enable_shrink=True), torch.ones(4, 128, dtype=torch.bfloat16)
        ids, weights = torch.tensor([[0, PER_RANK]] * 4), torch.ones(4, 2)
        asynchronous, errors, sums = "stream" in late, list[str](), list[float]()

        def layer(number: int) -> float:
            def await_loss(call: str) -> None:
                if comm.rank == 0 and number == 1 and call in late and not errors:
                    wait_for(lambda: comm.group.failure.aborted, "the loss")

            await_loss("dispatch")
            arguments = (x, ids, 4, 3 * PER_RANK)
            rows, _, handle, _, hook = buffer.low_latency_dispatch(
                *arguments, use_fp8=False, async_finish=asynchronous, return_recv_hook=late == "hook"
            )
            if hook is not None:
                await_loss("hook")
                hook()
            await_loss("combine")
            results = rows * 10**number
            combined, _, _ = buffer.low_latency_combine(results, ids, weights, handle, async_finish=asynchronous)
            return combined[0, 0].item()

        assert layer(0) == 2
        complete.wait(TIMEOUT)
        if comm.rank == 2:
            comm.abort("rank 2 is lost")
            comm.close()
            return
        while len(sums) < 3:
            try:
                sums.append(layer(len(sums)))
            except CommunicatorError as error:
                errors.append(str(error))
                sums.clear()
        assert sums == [2, 20, 200]
        assert errors == ["rank 2 ended the communicator: rank 2 is lost"]
        buffer.communicator.close()

    run_ranks(3, body, make_runtime=runtime_with_blocks)


@pytest.mark.host_only(reason="more ranks than most machines have GPUs")
def test_a_rank_that_already_excludes_a_masked_rank_learns_of_a_failed_call(monkeypatch: pytest.MonkeyPatch) -> None:
    excludes, failed, shrink = threading.Event(), threading.Event(), Communicator.shrink

    def shrink_late(comm: Communicator, **options: Any) -> Communicator:
        if comm.rank == 1:
            excludes.set()
            assert failed.wait(TIMEOUT)
        return shrink(comm, **options)

    monkeypatch.setattr(Communicator, "shrink", shrink_late)

    def body(comm: Communicator) -> None:
        if comm.rank == 2:
            assert failed.wait(TIMEOUT)
            return
        buffer, mixture = deep_ep.Buffer(comm, enable_shrink=True), mixture_of(comm)
        buffer.low_latency_update_mask_buffer(2, mask=True)
        if comm.rank == 0:
            assert excludes.wait(TIMEOUT)
            comm.abort("a call failed")
            failed.set()
        arguments = (mixture.tokens, mixture.ids, mixture.most_tokens, mixture.experts)
        with pytest.raises(AbortedError, match="a call failed"):
            buffer.low_latency_dispatch(*arguments)
        buffer.low_latency_dispatch(*arguments)
        buffer.communicator.close()

    run_ranks(3, body, make_runtime=runtime_with_blocks)


@pytest.mark.host_only(reason="more ranks than most machines have GPUs")
def test_a_new_process_takes_the_place_of_a_lost_rank() -> None:
    """Rank 1 is replaced. Rank 3 is masked before the buffer grows, and is left out of the next dispatch."""
    whole = ThreadBootstrap.create(4)

    def body(comm: Communicator) -> None:
        mixture = mixture_of(comm)
        arguments = (mixture.tokens, mixture.ids, mixture.most_tokens, mixture.experts)

        def step(buffer: Any, *lost: int) -> Any:
            rows, _, handle, _, _ = buffer.low_latency_dispatch(*arguments, use_fp8=False)
            combined, _, _ = buffer.low_latency_combine(rows, mixture.ids, mixture.weights, handle)
            left = (mixture.ids >= 0) & ~torch.isin(mixture.ids // PER_RANK, torch.tensor(lost, dtype=torch.int64))
            factors = torch.where(left, mixture.weights, 0).sum(1, keepdim=True)
            torch.testing.assert_close(combined.float(), mixture.tokens.float() * factors, rtol=0.02, atol=0.02)
            return handle.routing.layer.ctx

        if comm.rank == 1:
            with Communicator(whole[1], comm.runtime, timeout=comm.timeout) as grown:
                buffer = deep_ep.Buffer(grown, enable_shrink=True)
                buffer.low_latency_update_mask_buffer(3, mask=True)
                step(buffer, 3)
            return
        buffer = deep_ep.Buffer(comm, enable_shrink=True)
        buffer.low_latency_update_mask_buffer(1, mask=True)
        before = step(buffer, 1)
        if comm.rank != 3:
            buffer.low_latency_update_mask_buffer(3, mask=True)
        with pytest.raises(ArgumentError, match=r"^communicator: has \(rank, ranks\) = .*; expected the buffer's"):
            buffer.grow(buffer.communicator)
        with buffer.communicator.grow(whole[comm.rank]) as grown:
            buffer.grow(grown)
            assert before.closed
            status = torch.ones(4, dtype=torch.int32)
            buffer.low_latency_query_mask_buffer(status)
            assert status.tolist() == [0, 0, 0, int(comm.rank != 3)]
            if comm.rank != 3:
                step(buffer, 3)

    run_ranks(4, body, make_runtime=runtime_with_blocks)


def test_what_is_refused() -> None:
    def body(comm: Communicator) -> None:
        def refused(what: str, call: Callable[[], Any], error: type[Exception] = ArgumentError) -> None:
            with pytest.raises(error, match=what):
                call()

        buffer, mixture = deep_ep.Buffer(comm, explicitly_destroy=True), mixture_of(comm)
        low_latency = (mixture.tokens, mixture.ids, mixture.most_tokens, mixture.experts)
        stats = torch.zeros(1, 1, dtype=torch.int64, device=mixture.tokens.device)
        refused("group", lambda: deep_ep.Buffer(None))
        refused("new_num_sms", lambda: deep_ep.Buffer.set_num_sms(7))
        refused("explicitly_destroy", deep_ep.Buffer(comm).destroy)
        goes = torch.ones(len(mixture.tokens), 1, dtype=torch.bool, device=mixture.tokens.device)
        refused("is_token_in_rank", lambda: buffer.dispatch(mixture.tokens, topk_idx=mixture.ids))
        refused("num_tokens_per_expert", lambda: buffer.dispatch(mixture.tokens, is_token_in_rank=goes))
        refused(
            "topk_weights",
            lambda: buffer.dispatch(mixture.tokens, is_token_in_rank=goes, topk_weights=mixture.weights),
        )
        refused("handle", lambda: buffer.combine(mixture.tokens, (None,) * 6))
        refused("num_experts", lambda: buffer.get_dispatch_layout(mixture.ids, 0))
        refused("topk_idx: ", lambda: dispatched(buffer, Mixture(mixture.tokens, mixture.ids, mixture.weights, 2, 9)))
        refused("use_ue8m0", lambda: buffer.low_latency_dispatch(*low_latency, use_ue8m0=True))
        both = {"async_finish": True, "return_recv_hook": True}
        refused("return_recv_hook", lambda: buffer.low_latency_dispatch(*low_latency, **both))
        refused("enable_shrink", lambda: buffer.low_latency_update_mask_buffer(0, mask=True))
        for what, call in {
            "use_mxfp4": lambda: buffer.low_latency_dispatch(*low_latency, use_mxfp4=True),
            "dispatch_wait_recv_cost_stats": lambda: buffer.low_latency_dispatch(
                *low_latency, dispatch_wait_recv_cost_stats=stats
            ),
            "get_local_buffer_tensor": lambda: buffer.get_local_buffer_tensor(torch.int8, torch.Size([1])),
        }.items():
            refused(what, call, NotImplementedError)
        buffer.low_latency_dispatch(*low_latency, use_mxfp4=False, use_mxfp8=None)  # disabled options
        buffer.destroy()
        buffer.destroy()
        refused("destroyed", lambda: buffer.low_latency_dispatch(*low_latency), ClosedError)

    with Ranks(1, make_runtime=runtime_with_blocks) as one:
        one.run(body)
