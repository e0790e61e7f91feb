"""Low-latency calls with hooks send without a wait for any peer, and are received when their hooks are called."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import deep_ep  # noqa: E402

from proxyccl import Communicator  # noqa: E402
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

        for stops in (False, True):  # the second time all calls are like earlier ones
            first, second = dispatched(1), dispatched(2)
            comm.barrier()
            if stops:
                stop.until_told(comm)
            # Rank 0 receives the first two and sends two combines and a third dispatch before the others receive any.
            returned = combined(first)
            third = dispatched(3)
            both = combined(second)
            if stops:
                stop.tell(comm)
            received(returned, 1)
            received(both, 2)
            received(combined(third), 3)

    run_ranks(ranks, body, make_runtime=runtime_with_blocks)
