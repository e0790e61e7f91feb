"""Execution plans on the verbs transport between emulated nodes, whose fake devices copy memory and check limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from proxyccl import Communicator, ExecutionPlan
from support.cases.plan_documents import all_gather, all_reduce_of_nodes, port_packets
from support.fakes.network import FakeNetwork
from support.ranks import Ranks
from support.transports import needs_verbs

pytestmark = [
    pytest.mark.host_only(reason="devices of the CPU's memory"),
    pytest.mark.own_proxy(reason="devices of this process"),
    needs_verbs,
]

RANKS, LOCAL = 4, 2
BETWEEN = {(a, b): "verbs" for a in range(LOCAL) for b in range(LOCAL, RANKS)}


@pytest.mark.parametrize(
    ("document", "gathers"),
    [
        (all_gather(RANKS, "port", "put"), True),
        (all_gather(RANKS, "port", "pwsf"), True),
        (port_packets(RANKS), True),
        (all_reduce_of_nodes(RANKS, LOCAL), False),
    ],
    ids=["put", "pwsf", "packets", "all_reduce"],
)
def test_port_channels_cross_nodes(monkeypatch: pytest.MonkeyPatch, document: dict[str, Any], gathers: bool) -> None:
    network, plan = FakeNetwork(monkeypatch), ExecutionPlan.load(document)

    def body(comm: Communicator) -> int:
        for seed in range(5):
            count = 24 if seed < 3 else 6000  # puts of 6000 floats take several requests
            inputs = np.arange(count, dtype=np.float32) * (seed + 1) + np.arange(RANKS, dtype=np.float32)[:, None]
            out = np.zeros((RANKS, count) if gathers else count, np.float32)
            comm.execute(plan, inputs[comm.rank].copy(), out=out)
            np.testing.assert_array_equal(out, inputs if gathers else inputs.sum(0))
        return network.requests()

    with Ranks(RANKS, local_world_size=LOCAL, transport=BETWEEN) as nodes:
        assert all(nodes.run(body))
