"""Collectives and execution plans over verbs between emulated nodes. Fake devices copy memory and check every limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from proxyccl import Communicator, ExecutionPlan
from support.cases.plan_documents import all_gather, all_reduce_of_nodes, port_packets
from support.cases.reference import MOVES, Call
from support.cases.span_calls import COLLECTIVES, Kind, SpanCalls
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


def test_each_algorithm_gives_the_results_of_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    network = FakeNetwork(monkeypatch)

    def body(comm: Communicator) -> int:
        for count in (1, 5003):
            for seed, algorithm in enumerate((None, "two_shot", "ring", "proxy", "hierarchical")):
                Call("all_reduce", "float32", "sum", algorithm, count, in_place=seed % 2 == 0, seed=seed).run(comm)
            for collective in ("reduce_scatter", *MOVES):
                for algorithm in (None, "proxy"):
                    Call(collective, "float32", "sum", algorithm, count, root=RANKS - 1).run(comm)
        return network.requests()

    with Ranks(RANKS, local_world_size=LOCAL, transport=BETWEEN) as nodes:
        assert all(nodes.run(body))


@pytest.mark.parametrize("kind", ["registered", "empty"])
def test_spans_arrive_whole(monkeypatch: pytest.MonkeyPatch, kind: Kind) -> None:
    network, share = FakeNetwork(monkeypatch), 20_003

    def body(comm: Communicator) -> int:
        calls = SpanCalls(comm, share * comm.world_size, (kind, kind))
        for seed in range(9):
            calls.run(COLLECTIVES[seed % 3], (1, 4096, share)[seed // 3], seed, root=seed % comm.world_size)
        return network.requests()

    with Ranks(RANKS, local_world_size=LOCAL, transport=BETWEEN) as nodes:
        assert all(nodes.run(body))


def test_a_repeated_call_does_not_reach_memory_that_has_taken_the_ids_of_its_array(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeNetwork(monkeypatch)

    def body(comm: Communicator) -> None:
        x, y = (comm.empty(5003, "int32") for _ in range(2))
        first, second = np.asarray(x), np.asarray(y)
        ids = comm.register(x).id
        for turn in range(3):
            first[:] = 2 * turn + comm.rank
            comm.broadcast(x, 0, algorithm="proxy")
            assert (first == 2 * turn).all()
        comm.deregister(x)
        assert comm.register(y).id == ids
        first[:], second[:] = 8 + comm.rank, -1
        comm.broadcast(x, 0, algorithm="proxy")
        assert (first == 8).all()
        assert (second == -1).all()

    with Ranks(2, local_world_size=1, transport="verbs") as nodes:
        nodes.run(body)


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
