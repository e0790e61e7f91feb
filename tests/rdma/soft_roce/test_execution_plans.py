"""Execution plans whose port channels cross two nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from proxyccl import Communicator, ExecutionPlan
from support.cases.plan_documents import all_gather, all_reduce_of_nodes, port_packets
from support.ranks import Ranks
from support.soft_roce.nodes import LOCAL, RANKS, TIMEOUT, rdma_of

STAGED = {(a, b): "staged" for a in range(LOCAL) for b in range(LOCAL, RANKS)}
COUNT = 5 * 4 * RANKS


# That plans are the same over staged links, collectives by proxy and test_daemon.py show: they take the same channels.
@pytest.mark.parametrize(
    "transport", [pytest.param(None, id="verbs"), pytest.param(STAGED, id="staged", marks=pytest.mark.full)]
)
def test_plans_run_between_nodes(transport: Any) -> None:
    gather, packets = ExecutionPlan.load(all_gather(RANKS, "port", "pwsf")), ExecutionPlan.load(port_packets(RANKS))
    reduce = ExecutionPlan.load(all_reduce_of_nodes(RANKS, LOCAL))

    def body(comm: Communicator) -> None:
        x, gathered = np.empty(COUNT, np.float32), np.empty((RANKS, COUNT), np.float32)
        for seed in range(3):  # packets alternate between the halves of scratch memory
            inputs = np.arange(COUNT) * (seed + 1) + np.arange(RANKS)[:, None]
            x[:] = inputs[comm.rank]
            for plan in (gather, packets):
                comm.execute(plan, x, out=gathered)
                np.testing.assert_array_equal(gathered, inputs)
            np.testing.assert_array_equal(comm.all_reduce(x, algorithm=reduce), inputs.sum(0))

    with Ranks(
        RANKS,
        options_of=lambda rank: rdma_of(rank, LOCAL, staging_bytes=32 << 10, staging_chunk=8 << 10),
        local_world_size=LOCAL,
        timeout=TIMEOUT,
        transport=transport,
    ) as nodes:
        nodes.run(body)
