"""Collectives across two nodes of two ranks: results must equal the results on one node, for integers bit by bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from proxyccl import Communicator, DispatchCombine
from support.cases.reference import MOVES, Call
from support.ranks import Ranks
from support.running import run_ranks
from support.soft_roce.nodes import RANKS, two_nodes
from support.soft_roce.wire import Wire

COUNTS = (1, 5003)
TYPES = (("int64", "sum"), ("float32", "avg"), ("bfloat16", "sum"))
# Collectives that run without --full. tests/rdma/test_collectives_over_verbs.py runs all collectives, on fake devices.
ALWAYS = {("all_reduce", "hierarchical"), ("reduce_scatter", None), ("all_to_all", None)}


def case(collective: str, algorithm: str | None) -> Any:
    """Returns a collective and an algorithm as a test parameter; most run only with --full."""
    marks = [] if (collective, algorithm) in ALWAYS else pytest.mark.full
    return pytest.param(collective, algorithm, id=f"{algorithm}-{collective}", marks=marks)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Ranks]:
    with two_nodes() as group:
        yield group


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [case("all_reduce", algorithm) for algorithm in (None, "two_shot", "ring", "proxy", "hierarchical")],
)
def test_all_reduce(nodes: Ranks, collective: str, algorithm: str | None, pytestconfig: pytest.Config) -> None:
    types = TYPES if pytestconfig.getoption("--full") else TYPES[:1]

    def body(comm: Communicator) -> None:
        for seed, (dtype, op) in enumerate(types):
            for count in COUNTS:
                Call(collective, dtype, op, algorithm, count, in_place=seed % 2 == 0, seed=seed).run(comm)

    nodes.run(body)


@pytest.mark.parametrize(
    ("collective", "algorithm"),
    [case(collective, algorithm) for algorithm in (None, "proxy") for collective in ("reduce_scatter", *MOVES)],
)
def test_the_other_collectives(nodes: Ranks, collective: str, algorithm: str | None) -> None:
    def body(comm: Communicator) -> None:
        for count in COUNTS:
            Call(collective, "int32", "sum", algorithm, count, root=RANKS - 1).run(comm)
        comm.barrier()

    nodes.run(body)


def experts_flow(comm: Communicator) -> tuple[bytes, bytes]:
    """Makes a dispatch and a combine of integers in float32, whose sums are exact, and returns both results."""
    tokens, hidden, topk, experts_per_rank = 7 + comm.rank, 16, 2, 2
    rng = np.random.default_rng(comm.rank)
    x = rng.integers(-100, 100, (tokens, hidden)).astype(np.float32)
    ids = rng.integers(0, experts_per_rank * comm.world_size, (tokens, topk), dtype=np.int32)
    moe = DispatchCombine(comm, hidden=hidden, max_tokens=16, experts_per_rank=experts_per_rank, topk=topk)
    moe.prepare(x, ids)
    rows = np.asarray(moe.dispatch(x)[0])
    out = np.asarray(moe.combine(2 * rows))
    assert np.array_equal(out, 2 * topk * x)
    return rows.tobytes(), out.tobytes()


@pytest.mark.full  # test_expert_parallel.py tests dispatch and combine without --full
def test_dispatch_and_combine_give_what_they_give_on_one_node(nodes: Ranks) -> None:
    assert nodes.run(experts_flow) == run_ranks(RANKS, experts_flow)


@pytest.mark.slow
def test_the_same_over_a_bad_wire(nodes: Ranks, wire: Wire) -> None:
    """Collectives are right if the wire loses and delays packets, because the queue pairs retransmit."""
    wire.disturb("loss", "2%", "delay", "1ms")

    def body(comm: Communicator) -> None:
        Call("all_reduce", "int64", "sum", None, 20_000, seed=1).run(comm)
        Call("all_to_all", "int64", "sum", None, 3000, seed=2).run(comm)

    nodes.run(body)
