"""The expert-parallel layer across two nodes of two ranks: outputs and descriptors equal a numpy reference's."""

from __future__ import annotations

import numpy as np

from proxyccl import Communicator, EPAll2AllLayer
from support.cases.expert_oracle import Routing
from support.soft_roce.nodes import LOCAL, RANKS, two_nodes

HIDDEN, TOPK, EXPERTS, MAX_TOKENS = 16, 3, 2 * RANKS, 16


def test_dispatch_and_combine_twice_in_a_row() -> None:
    rngs = [np.random.default_rng(rank) for rank in range(RANKS)]
    routings, inputs = [], []
    for step in range(2):
        counts = [(5 * rank + 9 * step) % (MAX_TOKENS + 1) for rank in range(RANKS)]
        ids = [rng.integers(0, EXPERTS + 1, (count, TOPK), np.int32) for rng, count in zip(rngs, counts, strict=True)]
        routings.append(Routing(tuple(ids), EXPERTS, LOCAL, MAX_TOKENS))
        inputs.append([rng.normal(size=(n, HIDDEN)).astype(np.float32) for rng, n in zip(rngs, counts, strict=True)])
    rows = [routing.dispatch(x) for routing, x in zip(routings, inputs, strict=True)]
    sums = [routing.combine(there) for routing, there in zip(routings, rows, strict=True)]

    def body(comm: Communicator) -> None:
        rank = comm.rank
        with EPAll2AllLayer(
            comm, MAX_TOKENS, HIDDEN, TOPK, rank, EXPERTS, LOCAL, RANKS, dtype="float32", num_sm=2
        ) as layer:
            for step, routing in enumerate(routings):
                output, _, desc = layer.dispatch(inputs[step][rank], routing.ids[rank])
                assert np.array_equal(output, rows[step][rank])
                layout = routing.layout(rank)
                for name in ("send_reqs_recv_tensor", "topk_indices_tensor", "token_dst_scatter_idx"):
                    assert np.array_equal(np.asarray(getattr(desc, name)), getattr(layout, name)), name
                assert np.array_equal(layer.combine(output, desc), sums[step][rank])

    with two_nodes() as nodes:
        nodes.run(body)
