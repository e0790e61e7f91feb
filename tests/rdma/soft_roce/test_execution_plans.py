"""Execution plans whose port channels cross two nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from proxyccl import Communicator, ExecutionPlan
from support.cases.plan_documents import all_gather, all_reduce_of_nodes, port_packets
from support.ranks import Ranks
from support.soft_roce.nodes import LOCAL, RANKS, TIMEOUT, rdma_of, two_nodes

STAGED = {(a, b): "staged" for a in range(LOCAL) for b in range(LOCAL, RANKS)}
COUNT = 5 * 4 * RANKS


@pytest.mark.full
@pytest.mark.parametrize("transport", [None, STAGED], ids=["verbs", "staged"])
def test_plans_run_between_nodes(transport: Any) -> None:
    gather, packets = ExecutionPlan.load(all_gather(RANKS, "port", "pwsf")), ExecutionPlan.load(port_packets(RANKS))
    reduce = ExecutionPlan.load(all_reduce_of_nodes(RANKS, LOCAL))

    def body(comm: Communicator) -> None:
        x, gathered = np.empty(COUNT, np.float32), np.empty((RANKS, COUNT), np.float32)
        for seed in range(3):  # successive calls use alternate halves of the scratch memory for packets
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


# tests/rdma/test_collectives_over_verbs.py runs other plans over fake devices.
@pytest.mark.slow
def test_a_plan_runs_between_two_ranks() -> None:
    plan = ExecutionPlan.load(all_gather(2, "port", "pwsf"))
    inputs = np.arange(COUNT, dtype=np.float32) + np.arange(2, dtype=np.float32)[:, None]

    def body(comm: Communicator) -> None:
        gathered = np.zeros((2, COUNT), np.float32)
        comm.execute(plan, inputs[comm.rank].copy(), out=gathered)
        np.testing.assert_array_equal(gathered, inputs)

    with two_nodes(local=1) as pair:
        pair.run(body)
