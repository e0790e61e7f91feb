"""Outputs of a buffer's dispatch stay valid, although senders store rows directly in memory that later dispatches
reuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import deep_ep  # noqa: E402

from proxyccl import Communicator  # noqa: E402
from proxyccl.device.arrays.array import as_view  # noqa: E402
from support.devices import ON_HOST, runtime_with_blocks, torch_device  # noqa: E402
from support.ranks import Ranks  # noqa: E402
from support.stream_words import wait_value, write_value  # noqa: E402

TOKENS, HIDDEN, PER_RANK = 40, 512, 2

on_gpus = pytest.mark.skipif(ON_HOST, reason="torch's CPU has neither streams nor graphs")


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2, make_runtime=runtime_with_blocks) as made:
        yield made


def dispatch(comm: Communicator, buffer: Any, value: float, **options: Any) -> tuple[Any, Any]:
    device = torch_device(comm)
    to_both = torch.arange(2, device=device).expand(TOKENS, 2)
    rows, _, _, _, handle, _ = buffer.dispatch(
        torch.full((TOKENS, HIDDEN), value + comm.rank, dtype=torch.bfloat16, device=device),
        topk_idx=(to_both * PER_RANK).contiguous(),
        topk_weights=torch.ones(TOKENS, 2, device=device),
        is_token_in_rank=to_both >= 0,
        num_tokens_per_expert=torch.zeros(2 * PER_RANK, dtype=torch.int32, device=device),
        **options,
    )
    return rows, handle


def holds(rows: Any, value: float) -> bool:
    sources = torch.arange(2, device=rows.device).repeat_interleave(TOKENS)
    return bool((rows == value + sources[:, None]).all())


def lies_in_buffer(rows: Any, handle: Any) -> bool:
    """Returns whether peers stored the rows directly in an output buffer, without a later copy."""
    layer = handle.routing.layer
    return as_view(rows, "rows").ptr in layer.ctx.workspace.outputs.numbers


def test_outputs_stay_and_their_memory_comes_back(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer = deep_ep.Buffer(comm, explicitly_destroy=True)
        held = [dispatch(comm, buffer, value) for value in range(4)]
        assert [lies_in_buffer(*each) for each in held] == [True, True, False, False]
        for value, (rows, handle) in enumerate(held):
            assert holds(rows, value)
            assert (buffer.combine(rows, handle)[0] == 2 * (value + comm.rank)).all()
        part = held[0][0][TOKENS:]
        del held, rows, handle
        for value in range(3):
            rows, handle = dispatch(comm, buffer, value)
            assert lies_in_buffer(rows, handle)
            assert holds(rows, value)
            del rows
        assert (part == 1).all()
        last, _ = dispatch(comm, buffer, 7)
        buffer.destroy()
        assert (part == 1).all()
        assert holds(last, 7)

    pair.run(body)


@on_gpus
def test_memory_waits_for_the_streams_on_which_it_was_recorded(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer, runtime = deep_ep.Buffer(comm, explicitly_destroy=True), comm.runtime
        stream, opener, gate = torch.cuda.Stream(), runtime.create_stream(), comm.empty(1, "int64").fill(0)
        others = [dispatch(comm, buffer, 3)[0] for _ in range(2)]
        del others[0]
        for turn in (1, 2):
            rows, handle = dispatch(comm, buffer, 5)
            assert lies_in_buffer(rows, handle)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                wait_value(runtime, gate.ptr, turn, stream.cuda_stream)
                copied = rows.clone()
            try:
                rows.record_stream(stream)
                del rows
                meanwhile, handle = dispatch(comm, buffer, 9)
                assert not lies_in_buffer(meanwhile, handle)
            finally:
                write_value(runtime, gate.ptr, turn, opener)
            stream.synchronize()
            assert holds(copied, 5)
            assert holds(meanwhile, 9)
        buffer.destroy()

    pair.run(body)


@on_gpus
def test_what_torch_gave_up_is_used_again(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer = deep_ep.Buffer(comm, explicitly_destroy=True)
        for _ in range(3):
            torch.cuda.empty_cache()
            assert lies_in_buffer(*dispatch(comm, buffer, 2))
        buffer.destroy()

    pair.run(body)


@on_gpus
def test_a_graph_has_memory_of_its_own(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        buffer = deep_ep.Buffer(comm, explicitly_destroy=True)
        options = {"num_worst_tokens": 2 * TOKENS}
        dispatch(comm, buffer, 1, **options)
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            captured, handle = dispatch(comm, buffer, 3, **options)
            assert not lies_in_buffer(captured, handle)
            combined = buffer.combine(captured, handle)[0]
        eager = [dispatch(comm, buffer, value, **options)[0] for value in (5, 6)]
        graph.replay()
        torch.cuda.synchronize()
        assert holds(captured, 3)
        assert (combined == 2 * (3 + comm.rank)).all()
        assert all(holds(rows, value) for rows, value in zip(eager, (5, 6), strict=True))
        buffer.destroy()

    pair.run(body)
