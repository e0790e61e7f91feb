"""DeepEP 2.1.0's ElasticBuffer: signatures, shapes, types and values of each call, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import deep_ep  # noqa: E402

from proxyccl import ArgumentError, CapacityError, ClosedError, Communicator  # noqa: E402
from proxyccl.deep_ep import connected  # noqa: E402
from support.cases.deep_ep_clients import Mixture, quantized  # noqa: E402
from support.cases.deep_ep_oracle import Arrived, same, signature  # noqa: E402
from support.devices import ON_HOST, runtime_with_blocks, torch_device  # noqa: E402
from support.ranks import Ranks  # noqa: E402

MOST, PER_RANK, HIDDEN = 20, 4, 1024
WORLDS: list[tuple[int, dict[str, int]]] = [(3, {}), (4, {"local_world_size": 2})] if ON_HOST else [(2, {})]
SIGNATURES = {
    "__init__": "group num_bytes=None num_cpu_bytes=0 num_max_tokens_per_rank=0 hidden=0 num_topk=0 "
    "use_fp8_dispatch=False deterministic=False allow_hybrid_mode=True allow_multiple_reduction=True "
    "prefer_overlap_with_compute=True sl_idx=3 num_allocated_qps=0 num_cpu_timeout_secs=300 num_gpu_timeout_secs=100 "
    "explicitly_destroy=False",
    "dispatch": "x topk_idx=None topk_weights=None cumulative_local_expert_recv_stats=None num_experts=None "
    "num_max_tokens_per_rank=None expert_alignment=None num_sms=0 num_qps=0 previous_event=None "
    "previous_event_before_epilogue=None async_with_compute_stream=False allocate_on_comm_stream=False handle=None "
    "do_handle_copy=True do_cpu_sync=None do_expand=False do_zero_padding=False use_tma_aligned_col_major_sf=False",
    "combine": "x handle topk_weights=None bias=None num_sms=0 num_qps=0 previous_event=None "
    "previous_event_before_epilogue=None async_with_compute_stream=False allocate_on_comm_stream=False",
    "get_buffer_size_hint": "group num_max_tokens_per_rank hidden num_topk=0 use_fp8_dispatch=False "
    "allow_hybrid_mode=True allow_multiple_reduction=True",
    "barrier": "use_comm_stream=True with_cpu_sync=False sequential=True",
    "capture": "",
    "destroy": "",
    "get_comm_stream": "",
    "get_logical_domain_size": "",
    "get_physical_domain_size": "",
    "get_theoretical_num_qps": "num_sms",
    "get_theoretical_num_sms": "num_experts num_topk num_scaleout_topk=0 rdma_gbs=0 nvlink_gbs=0 sm_read_gbs=200 "
    "sm_write_gbs=50",
}


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    with Ranks(1, make_runtime=runtime_with_blocks) as made:
        yield made


def begun(comm: Communicator, **options: Any) -> tuple[Any, Mixture, Arrived]:
    """Returns a new buffer, this rank's tokens with their experts, and the tokens that arrive at this rank."""
    mixture = Mixture.of(comm.rank, comm.world_size, torch_device(comm))
    buffer = deep_ep.ElasticBuffer(
        comm, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=mixture.ids.shape[1], **options
    )
    return buffer, mixture, Arrived.at(comm)


def dispatched(buffer: Any, mixture: Mixture, x: Any = None, **options: Any) -> tuple[Any, ...]:
    return buffer.dispatch(
        mixture.tokens if x is None else x,
        topk_idx=mixture.ids,
        topk_weights=mixture.weights,
        num_experts=mixture.experts,
        **options,
    )


def times(mixture: Mixture, comm: Communicator) -> Any:
    """Returns the number of ranks to which each token goes, float32 [T, 1]."""
    per_rank = mixture.experts // comm.world_size
    goes = [((mixture.ids // per_rank == rank) & (mixture.ids >= 0)).any(1) for rank in range(comm.world_size)]
    return torch.stack(goes, 1).sum(1, keepdim=True).float()


def kept(mixture: Mixture) -> Any:
    return torch.where(mixture.ids >= 0, mixture.weights, 0)


def heads_of(arrived: Arrived, here: Any, scaleup: int) -> Any:
    """Returns int64 [N, 2]. Column 0 is the token's global number. Column 1 is 4 * (source rank in the scale-up domain)
    + (the token's last slot for which `here` is true).
    """
    last = torch.where(here, torch.arange(4, device=here.device), -1).amax(1)
    return torch.stack([arrived.sources * MOST + arrived.numbers, arrived.sources % scaleup * 4 + last], 1)


def sent_slots(mixture: Mixture, comm: Communicator) -> Any:
    """Returns int32 [T, 4], with -1 except in the last slot that a token has for a destination rank. This slot holds
    this rank * MOST + the number of this rank's earlier tokens for the same destination.
    """
    sent = [0] * comm.world_size
    numbers = torch.full(mixture.ids.shape, -1, dtype=torch.int32)
    for token, ids in enumerate((mixture.ids // (mixture.experts // comm.world_size)).tolist()):
        for rank in {rank for rank in ids if rank >= 0}:
            last = max(slot for slot, other in enumerate(ids) if other == rank)
            numbers[token, last] = comm.rank * MOST + sent[rank]
            sent[rank] += 1
    return numbers.to(mixture.ids.device)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    assert signature(getattr(deep_ep.ElasticBuffer, name)) == SIGNATURES[name]


def test_what_a_dispatch_gives(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer, mixture, arrived = begun(comm)
        stats = torch.ones(PER_RANK, dtype=torch.int32, device=mixture.ids.device)
        received, ids, weights, handle, event = dispatched(
            buffer, mixture, expert_alignment=8, cumulative_local_expert_recv_stats=stats
        )
        assert event.event is None
        same(received, arrived.tokens)
        same(ids, arrived.ids)
        same(weights, arrived.weights)
        assert stats.tolist() == [1 + count for count in arrived.per_expert]

        aligned = [-(-count // 8) * 8 for count in arrived.per_expert]
        assert isinstance(handle, deep_ep.EPHandle)
        assert handle.num_recv_tokens_per_expert_list == aligned
        assert (handle.num_recv_tokens, handle.num_expanded_tokens) == (len(received), sum(aligned))
        assert handle.psum_num_recv_tokens_per_expert.tolist() == torch.tensor(aligned).cumsum(0).tolist()
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == arrived.per_expert
        heads = heads_of(arrived, arrived.ids.ge(0), buffer.num_scaleup_ranks)
        same(handle.recv_src_metadata, torch.nn.functional.pad(heads, (0, 4), value=-1).to(torch.int32))
        same(handle.dst_buffer_slot_idx, sent_slots(mixture, comm))
        assert handle.token_metadata_at_forward is handle.channel_linked_list is None
        assert handle.topk_idx is not mixture.ids
        same(handle.topk_idx, mixture.ids)

        # Dispatch different values with the same handle, then return the weights to their source ranks.
        again, same_ids, nothing, same_handle, _ = buffer.dispatch(2 * mixture.tokens, handle=handle)
        same(again, 2 * arrived.tokens)
        same(same_ids, ids)
        assert nothing is None
        assert same_handle is handle
        same(buffer.dispatch(mixture.tokens, topk_weights=2 * mixture.weights, handle=handle)[2], 2 * weights)
        combined, back, _ = buffer.combine(received, handle, topk_weights=torch.where(ids < 0, 7, weights))
        same(back, kept(mixture))
        same(combined, (mixture.tokens.float() * times(mixture, comm)).to(torch.bfloat16))
        bias = torch.full_like(mixture.tokens, 0.3)
        sums = 2 * bias.float() + mixture.tokens.float() * times(mixture, comm)
        same(buffer.combine(received, handle, bias=(bias, bias))[0], sums.to(torch.bfloat16))  # rounded once
        assert dispatched(buffer, mixture, do_handle_copy=False)[3].topk_idx is mixture.ids

    ranks.run(body)


@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("once", [False, True], ids=["sums on each rank", "one sum"])
def test_what_an_expanded_dispatch_gives(ranks: Ranks, alignment: int, once: bool) -> None:
    def body(comm: Communicator) -> None:
        if once and comm.world_size > comm.local_world_size:
            with pytest.raises(NotImplementedError, match="allow_multiple_reduction=False across nodes"):
                begun(comm, allow_multiple_reduction=False)
            return
        buffer, mixture, arrived = begun(comm, allow_multiple_reduction=not once)
        slots, filled = arrived.expanded(alignment)
        tokens, places = slots.ge(0).nonzero(as_tuple=True)
        rows = slots[tokens, places]
        options = {"expert_alignment": alignment, "do_expand": True, "do_zero_padding": True}
        received, ids, weights, handle, _ = dispatched(buffer, mixture, **options)
        assert ids is None
        expected = torch.zeros(len(filled), HIDDEN, dtype=torch.bfloat16, device=slots.device)
        expected[rows] = arrived.tokens[tokens]
        same(received, expected)
        expected_weights = torch.zeros(len(filled), device=slots.device)
        expected_weights[rows] = arrived.weights[tokens, places]
        same(weights, expected_weights)

        counts = torch.tensor(arrived.per_expert)
        aligned = -(-counts // alignment) * alignment
        assert handle.num_recv_tokens_per_expert_list == aligned.tolist()
        assert handle.psum_num_recv_tokens_per_expert.tolist() == (aligned.cumsum(0) - aligned + counts).tolist()
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == arrived.per_expert
        assert (handle.num_recv_tokens, handle.num_expanded_tokens) == (len(slots), len(filled))
        scaleup = buffer.num_scaleup_ranks
        from_ranks = (arrived.sources % scaleup).bincount(minlength=scaleup)
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == from_ranks.cumsum(0).tolist()
        heads = heads_of(arrived, slots.ge(0), scaleup)
        same(handle.recv_src_metadata, torch.cat([heads, slots], 1).to(torch.int32))

        again, _, other_weights, _, _ = buffer.dispatch(
            2 * mixture.tokens, topk_weights=2 * mixture.weights, handle=handle, do_expand=True, do_zero_padding=True
        )
        same(again, 2 * expected)
        same(other_weights, 2 * expected_weights)
        combined, back, _ = buffer.combine(received, handle, topk_weights=weights)
        same(back, kept(mixture))
        factors = mixture.ids.ge(0).sum(1, keepdim=True)  # small integers, so that the sums' rounding errors are small
        torch.testing.assert_close(combined.float(), mixture.tokens.float() * factors, rtol=0.01, atol=0.01)

    ranks.run(body)


@pytest.mark.parametrize("expands", [False, True], ids=["plain", "expanded"])
def test_ranks_are_added_to_the_bias_in_the_order_of_their_last_slots(ranks: Ranks, expands: bool) -> None:
    def body(comm: Communicator) -> None:
        buffer, mixture, _ = begun(comm)
        received, _, _, handle, _ = dispatched(buffer, mixture, do_expand=expands)
        per_rank = mixture.experts // comm.world_size
        values = [2.0**25, 1.0, -(2.0**25), 0.5]  # the sum of these values depends on their order
        bias = torch.full_like(mixture.tokens, 0.25)
        given = torch.full_like(received, values[comm.rank])
        combined = buffer.combine(given, handle, bias=bias)[0]
        if comm.world_size > comm.local_world_size:  # nodes round their partial sums, so `expected` does not hold
            return
        expected = torch.full((len(mixture.ids),), 0.25, device=combined.device)
        for token, ids in enumerate(mixture.ids.tolist()):
            slots = {each // per_rank: slot for slot, each in enumerate(ids) if each >= 0}
            for rank in sorted(slots, key=slots.__getitem__):
                count = sum(each // per_rank == rank for each in ids if each >= 0) if expands else 1
                expected[token] += count * values[rank]  # in float32
        same(combined, expected.to(torch.bfloat16).unsqueeze(1).expand_as(combined))

    ranks.run(body)


@pytest.mark.parametrize("expands", [False, True], ids=["plain", "expanded"])
def test_without_waiting_outputs_have_room_for_the_most_rows(ranks: Ranks, expands: bool) -> None:
    def body(comm: Communicator) -> None:
        buffer, mixture, arrived = begun(comm, allow_hybrid_mode=False)
        slots, _ = arrived.expanded(8)
        received, ids, weights, handle, _ = dispatched(
            buffer, mixture, expert_alignment=8, do_cpu_sync=False, do_expand=expands
        )
        most = comm.world_size * MOST
        most_expanded = -(-(most * 4 + 7 * PER_RANK) // 8) * 8
        assert len(received) == (most_expanded if expands else most)
        assert handle.num_recv_tokens_per_expert_list == []
        assert (handle.num_recv_tokens, handle.num_expanded_tokens) == (most, most_expanded)
        from_ranks = arrived.sources.bincount(minlength=comm.world_size)
        assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == from_ranks.cumsum(0).tolist()
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == arrived.per_expert
        assert handle.recv_src_metadata.shape == (most, 6)
        same(handle.recv_src_metadata[: len(slots), 0], (arrived.sources * MOST + arrived.numbers).to(torch.int32))
        if expands:
            rows, places = slots.ge(0).nonzero(as_tuple=True)
            same(received[slots[rows, places]], arrived.tokens[rows])
            same(handle.recv_src_metadata[: len(slots), 2:], slots.to(torch.int32))
        else:
            same(received[: len(slots)], arrived.tokens)
            same(ids[: len(slots)], arrived.ids)
            assert (ids[len(slots) :] == -1).all()
        combined, back, _ = buffer.combine(received, handle, topk_weights=weights)
        same(back, kept(mixture))
        factors = mixture.ids.ge(0).sum(1, keepdim=True) if expands else times(mixture, comm)
        torch.testing.assert_close(combined.float(), mixture.tokens.float() * factors, rtol=0.01, atol=0.01)

    ranks.run(body)


@pytest.mark.parametrize("kind", ["float32", "packed exponents", "padded"])
@pytest.mark.parametrize("columns", [False, True], ids=["by rows", "by columns"])
def test_float8_pairs(ranks: Ranks, kind: str, columns: bool) -> None:
    def body(comm: Communicator) -> None:
        buffer, mixture, arrived = begun(comm, use_fp8_dispatch=True)

        def pair(tokens: Any) -> tuple[Any, Any]:
            values, scales = quantized(tokens)
            if kind == "padded":  # with padding, a block's size does not follow from the number of scales
                return values, torch.cat([scales, scales[:, :3]], 1)
            return values, scales.view(torch.int32)[:, ::4] if kind != "float32" else scales.t().contiguous().t()

        slots, filled = arrived.expanded(8)
        tokens, places = slots.ge(0).nonzero(as_tuple=True)
        expected = pair(arrived.tokens)
        for expands in (False, True):
            options = {"do_expand": expands, "do_zero_padding": expands, "use_tma_aligned_col_major_sf": columns}
            (rows, scales), _, _, handle, _ = dispatched(
                buffer, mixture, pair(mixture.tokens), expert_alignment=8, **options
            )
            (again, again_scales), *_ = buffer.dispatch(pair(mixture.tokens), handle=handle, **options)
            same(again, rows)
            same(again_scales, scales)
            if columns:
                assert scales.stride() == (1, -(-len(rows) // 4) * 4)
            if expands:
                assert (scales[~filled] == 0).all()
                rows, scales = (each[slots[tokens, places]] for each in (rows, scales))
                same(rows, expected[0][tokens])
                same(scales, expected[1][tokens])
            else:
                same(rows, expected[0])
                same(scales, expected[1])

    ranks.run(body)


def test_calls_apart_from_the_current_stream(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer, mixture, arrived = begun(comm)
        options = {"async_with_compute_stream": True, "allocate_on_comm_stream": True}
        received, _, _, handle, event = dispatched(buffer, mixture, previous_event=buffer.capture(), **options)
        with event(release_handle=True) as entered:
            assert entered is event
        assert event.event is None
        same(received, arrived.tokens)
        combined, _, event = buffer.combine(
            received, handle, previous_event_before_epilogue=buffer.capture(), **options
        )
        finished: list[str] = []
        event.register_hook_after_wait(lambda: finished.append("waited"))
        event.current_stream_wait()
        event.current_stream_wait()
        assert finished == ["waited"]
        same(combined, (mixture.tokens.float() * times(mixture, comm)).to(torch.bfloat16))
        buffer.barrier(with_cpu_sync=True)

    ranks.run(body)


def test_streams_are_told_of_all_tensors_that_a_handle_keeps(one: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer, mixture, _ = begun(comm)
        handle = dispatched(buffer, mixture, do_expand=True)[3]
        kept = [
            handle.topk_idx,
            handle.num_unaligned_recv_tokens_per_expert,
            *handle.routing.desc.held,
        ]
        recorded = {tensor.data_ptr() for tensor in connected._tensors((mixture.tokens, [handle]))}
        assert recorded == {tensor.data_ptr() for tensor in (mixture.tokens, *kept)}

    one.run(body)


def test_what_a_buffer_tells(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer, _, _ = begun(comm, num_allocated_qps=5)
        hint = deep_ep.ElasticBuffer.get_buffer_size_hint(comm, MOST, HIDDEN, 4)
        assert (buffer.num_bytes, hint % (2 << 20), buffer.num_allocated_qps) == (hint, 0, 5)
        nodes = comm.world_size // comm.local_world_size
        assert buffer.get_physical_domain_size() == buffer.get_logical_domain_size() == (nodes, comm.local_world_size)
        assert (buffer.scaleout_rank_idx, buffer.scaleup_rank_idx) == divmod(comm.rank, comm.local_world_size)
        flat = begun(comm, allow_hybrid_mode=False, prefer_overlap_with_compute=False)[0]
        assert flat.get_logical_domain_size() == (1, comm.world_size)
        assert buffer.get_theoretical_num_sms(256, 8) < flat.get_theoretical_num_sms(256, 8)
        assert buffer.get_theoretical_num_qps(24) == 0

    ranks.run(body)


def test_too_many_tokens_are_refused_on_all_ranks(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer, mixture, arrived = begun(comm)
        with pytest.raises(CapacityError, match=r"^a rank dispatches \d+ tokens; num_max_tokens_per_rank is 8"):
            dispatched(buffer, mixture, num_max_tokens_per_rank=8)
        same(dispatched(buffer, mixture)[0], arrived.tokens)

    ranks.run(body)


def test_what_is_refused(one: Ranks) -> None:
    def body(comm: Communicator) -> None:
        def refused(what: str, call: Callable[[], Any], error: type[Exception] = ArgumentError) -> None:
            with pytest.raises(error, match=what):
                call()

        buffer, mixture, _ = begun(comm, explicitly_destroy=True)
        handle = dispatched(buffer, mixture)[3]
        expanded = dispatched(buffer, mixture, do_expand=True)[3]
        x, repeated = mixture.tokens, {"handle": handle}
        for what, call in {
            "group": lambda: deep_ep.ElasticBuffer(None),
            "explicitly_destroy": deep_ep.ElasticBuffer(comm).destroy,
            "topk_idx: must": lambda: buffer.dispatch(x),
            "topk_idx: is": lambda: buffer.dispatch(x, topk_idx=mixture.weights, num_experts=4),
            "num_experts": lambda: buffer.dispatch(x, topk_idx=mixture.ids),
            "num_max_tokens": lambda: buffer.dispatch(
                x, topk_idx=mixture.ids, num_experts=4, num_max_tokens_per_rank=0
            ),
            "expert_alignment: must": lambda: dispatched(buffer, mixture, expert_alignment=0),
            "do_zero_padding": lambda: dispatched(buffer, mixture, do_zero_padding=True),
            "topk_idx: can't": lambda: buffer.dispatch(x, topk_idx=mixture.ids, **repeated),
            "do_cpu_sync": lambda: buffer.dispatch(x, do_cpu_sync=True, **repeated),
            "expert_alignment: is 4": lambda: buffer.dispatch(x, expert_alignment=4, **repeated),
            r"^topk_idx: \[0, 0\] on rank 0": lambda: dispatched(
                buffer, Mixture(x, mixture.ids + 9, mixture.weights, 4, MOST)
            ),
            "handle: must": lambda: buffer.combine(x, (None,) * 6),
            "handle: comes from a dispatch": lambda: deep_ep.ElasticBuffer(comm).combine(x, handle),
            "scales": lambda: dispatched(buffer, mixture, (quantized(x)[0], x)),
        }.items():
            refused(what, call)
        for what, call in {
            "do_expand": lambda: buffer.dispatch(x, do_expand=True, **repeated),
            "do_expand=": lambda: buffer.dispatch(x, handle=expanded),
            "use_nvfp4": lambda: dispatched(buffer, mixture, use_nvfp4=True),
        }.items():
            refused(what, call, NotImplementedError)
        buffer.destroy()
        buffer.destroy()
        refused("destroyed", lambda: dispatched(buffer, mixture), ClosedError)

    one.run(body)
