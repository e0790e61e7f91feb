"""Low-latency calls with hooks: they send without waiting for a peer, and receive when their hooks are called. A hook
that is not called does not block later calls.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import deep_ep  # noqa: E402

from proxyccl import Communicator  # noqa: E402
from proxyccl.deep_ep import low_latency  # noqa: E402
from support.cases.deep_ep_clients import Mixture  # noqa: E402
from support.devices import runtime_with_blocks, torch_device  # noqa: E402
from support.running import Stop, run_ranks  # noqa: E402


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_stopped_peer_holds_no_call_that_sends(ranks: int) -> None:
    stop = Stop()

    def body(comm: Communicator) -> None:
        buffer, mixture = deep_ep.Buffer(comm, low_latency_mode=True), Mixture.of(comm.rank, ranks, torch_device(comm))
        factors = torch.where(mixture.ids >= 0, mixture.weights, 0).sum(1, keepdim=True)

        def dispatched(times: int) -> Any:
            x = times * mixture.tokens
            return buffer.low_latency_dispatch(
                x, mixture.ids, mixture.most_tokens, mixture.experts, use_fp8=False, return_recv_hook=True
            )

        def combined(sent: Any) -> Any:
            rows, _, handle, _, hook = sent
            hook()
            return buffer.low_latency_combine(rows, mixture.ids, mixture.weights, handle, return_recv_hook=True)

        def received(returned: Any, times: int) -> None:
            output, _, hook = returned
            hook()
            torch.testing.assert_close(output.float(), times * mixture.tokens.float() * factors, rtol=0.02, atol=0.02)

        for stops in (False, True):  # the second iteration repeats calls that the first has prepared
            first, second = dispatched(1), dispatched(2)
            comm.barrier()
            if stops:
                stop.until_told(comm)
            # Before other ranks receive, rank 0 receives two dispatches, and sends two combines and a third dispatch.
            returned = combined(first)
            third = dispatched(3)
            both = combined(second)
            if stops:
                stop.tell(comm)
            received(returned, 1)
            received(both, 2)
            received(combined(third), 3)

    run_ranks(ranks, body, make_runtime=runtime_with_blocks)


def ones(comm: Communicator, tokens: int, hidden: int, topk: int) -> tuple[Any, Any, Any]:
    device = torch_device(comm)
    ids = torch.arange(topk, device=device).repeat(tokens, 1)
    return torch.ones(tokens, hidden, dtype=torch.bfloat16, device=device), ids, torch.ones(tokens, topk, device=device)


@pytest.mark.parametrize(("hidden", "topk"), [(128, 2), (64, 3)])
def test_an_idle_rank_makes_no_layer_that_its_peers_do_not_make(hidden: int, topk: int) -> None:
    def body(comm: Communicator) -> None:
        buffer = deep_ep.Buffer(comm)

        def step(tokens: int, hidden: int, topk: int, most: Any = 4) -> None:
            x, ids, weights = ones(comm, tokens, hidden, topk)
            rows, _, handle, _, hook = buffer.low_latency_dispatch(
                x, ids, most, 8, use_fp8=False, return_recv_hook=True
            )
            hook()
            combined, _, hook = buffer.low_latency_combine(rows, ids, weights, handle, return_recv_hook=True)
            hook()
            assert torch.equal(combined, topk * x)

        step(4, 64, 2)
        step(4, 64, 2)
        step(4, hidden, topk)
        step(4 * comm.rank, 64, 2)  # rank 0 has no tokens, so it can't tell the shapes apart
        step(4, hidden, topk, np.int64(4) if comm.rank else 4)  # int and np.int64 are equivalent
        step(4, hidden, topk)

    run_ranks(2, body, make_runtime=runtime_with_blocks)


@pytest.mark.parametrize("losing", [[0], [0, 1]], ids=str)
def test_a_hook_that_is_not_called_holds_up_no_later_call(losing: list[int]) -> None:
    def body(comm: Communicator) -> None:
        buffer, (x, ids, weights) = deep_ep.Buffer(comm), ones(comm, 4, 64, 2)
        loses, stats = comm.rank in losing, torch.zeros(4, dtype=torch.int32, device=x.device)

        def dispatched(times: int, *, hooked: bool = True) -> Any:
            return buffer.low_latency_dispatch(times * x, ids, 4, 8, stats, use_fp8=False, return_recv_hook=hooked)

        def combined(sent: Any, *, hooked: bool = True, out: Any = None) -> Any:
            rows, _, handle, *_ = sent
            return buffer.low_latency_combine(rows, ids, weights, handle, return_recv_hook=hooked, out=out)

        def step(times: int, *, hooked: bool = True) -> None:
            sent = dispatched(times, hooked=hooked)
            if hooked:
                sent[-1]()
            output, _, hook = combined(sent, hooked=hooked)
            if hooked:
                hook()
            assert torch.equal(output, 2 * times * x)

        for hooked in (True, True, False):  # the second iteration repeats calls that the first has prepared
            dropped = dispatched(1)
            if not loses:
                dropped[-1]()
            before = stats.clone()
            for times in (2, 3, 4):
                step(times, hooked=hooked)
            assert torch.equal(stats - before, 3 * dropped[1])  # a dispatch is not counted before its hook is called
            if loses:  # a late hook finishes the dispatch that returned it
                dropped[-1]()
                assert torch.equal(stats - before, 4 * dropped[1])
            came = torch.arange(8, device=x.device) < dropped[1].unsqueeze(1)
            assert (dropped[0][came] == 1).all()

            out = torch.zeros_like(x)
            sent = dispatched(5)
            sent[-1]()
            _, _, hook = combined(sent, out=out)
            if not loses:
                hook()
            for times in (6, 7, 8):
                step(times, hooked=hooked)
            if loses:
                assert not out.any()  # before its hook is called, a call must not write its output
                hook()
            assert torch.equal(out, 10 * x)

    run_ranks(2, body, make_runtime=runtime_with_blocks)


def test_a_lack_of_memory_after_the_sends_holds_up_no_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise MemoryError

    def body(comm: Communicator) -> None:
        buffer, (x, ids, _) = deep_ep.Buffer(comm), ones(comm, 4, 512, 2)

        def dispatched() -> Any:
            return buffer.low_latency_dispatch(
                x, ids, 4, 8, use_fp8=True, round_scale=True, use_ue8m0=True, return_recv_hook=True
            )

        with pytest.raises(MemoryError):
            dispatched()
        comm.barrier()
        if comm.rank == 0:
            monkeypatch.undo()
        comm.barrier()
        for _ in range(3):
            *_, hook = dispatched()
            hook()

    monkeypatch.setattr(low_latency, "column_major", refuse)  # column_major() allocates the scales that the caller gets
    run_ranks(2, body, make_runtime=runtime_with_blocks)
