"""With padded rows, the sending half of a call waits for no peer, so that it completes even while peers are stopped."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from proxyccl import Communicator, EPAll2AllLayer
from support.device_arrays import on_device, on_host
from support.running import Stop, run_ranks

EXPERTS_PER_RANK, HIDDEN, TOPK = 2, 16, 3


# Ranks with few tokens send their expert ids to peers; ranks with many tokens send counts.
@pytest.mark.parametrize("tokens", [16, 1000], ids=["choices", "counts"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_stopped_peer_holds_no_sending_half(ranks: int, tokens: int) -> None:
    stop = Stop()

    def body(comm: Communicator) -> None:
        experts = EXPERTS_PER_RANK * ranks
        generator = np.random.default_rng(comm.rank)
        ids = generator.permuted(np.tile(np.arange(experts, dtype=np.int32), (tokens, 1)), axis=1)[:, :TOPK].copy()
        x = generator.integers(-8, 8, (tokens, HIDDEN)).astype(np.float32)
        n = comm.world_size
        options: dict[str, Any] = {"dtype": "float32", "layout": "padded"}
        with EPAll2AllLayer(
            comm, tokens, HIDDEN, TOPK, comm.rank, experts, comm.local_world_size, n, **options
        ) as layer:
            given, chosen = on_device(comm, x), on_device(comm, ids)
            assert layer.ctx.workspace.announces == ("ids" if tokens == 16 else "counts")

            def sent(times: int) -> Any:
                return layer.dispatch_send(on_device(comm, times * x), chosen)

            def returned(pending: Any) -> Any:
                rows, _, desc = layer.dispatch_recv(pending)
                return layer.combine_send(rows, desc)

            rows, _, desc = layer.dispatch(given, chosen)
            # Each rank sends a combine and a dispatch. Rank 0 receives both calls and sends the next combine and
            # dispatch before any other rank has received.
            combining, dispatching = layer.combine_send(rows, desc), sent(2)
            comm.barrier()
            stop.until_told(comm)
            first = on_host(layer.combine_recv(combining))
            combining = returned(dispatching)
            dispatching = sent(3)
            stop.tell(comm)
            second = on_host(layer.combine_recv(combining))
            third = on_host(layer.combine_recv(returned(dispatching)))
            for times, combined in ((1, first), (2, second), (3, third)):
                np.testing.assert_array_equal(combined, times * TOPK * x)

    run_ranks(ranks, body)
