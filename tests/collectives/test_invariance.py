"""With `invariant=True` a sum's bits depend only on the ranks' values of an element, not on the element's index."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from proxyccl import ArgumentError, Communicator
from proxyccl.channels.collectives.selection import Selector, SizeTable
from proxyccl.channels.execution_plans.plan import ExecutionPlan
from support.cases.plan_documents import all_gather, all_reduce_by_reads
from support.cases.reference import numpy_dtype
from support.device_arrays import barrier, on_device, on_host
from support.devices import ON_HOST, runtime_with_blocks, runtime_with_lines, world_sizes
from support.ranks import Ranks
from support.running import run_ranks

WIDTH = 60  # elements per row; rows end inside lines of 128 bytes
BATCHES = (1, 2, 7, 64, 700)
MAKERS = {"packets": runtime_with_blocks, "lines": runtime_with_lines} if ON_HOST else {"GPU": runtime_with_blocks}
WORLDS = [
    *((n, n) for n in world_sizes(2, 3, 4, 8)),
    *((n, 2) for n in world_sizes(4)),
    *((n, 1) for n in world_sizes(3)),
]


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world[0]} ranks, {world[1]} a node")
def world(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.fixture(scope="module", params=MAKERS)
def ranks(request: pytest.FixtureRequest, world: tuple[int, int]) -> Iterator[Ranks]:
    options = {"make_runtime": MAKERS[request.param], "local_world_size": world[1]}
    with Ranks(world[0], invariant=True, **options) as group:
        yield group


def rows_of(rank: int, name: str) -> NDArray[Any]:
    """Returns as many rows as the largest batch has, with values whose sum depends on the order of additions."""
    values = np.random.default_rng(rank).standard_normal((max(BATCHES), WIDTH))
    return (values * np.exp2(np.random.default_rng(7).integers(-9, 9, values.shape))).astype(numpy_dtype(name))


def expected_sums(ranks: Ranks, name: str, local: int) -> NDArray[Any]:
    """Returns the sums in the documented order: each node's ranks are added and rounded, then the nodes are added and
    rounded. For float16, a node's sum stays in float32.
    """
    dtype = numpy_dtype(name)
    wide = np.float64 if name == "float64" else np.float32
    rows = [rows_of(rank, name).astype(wide) for rank in range(ranks.world_size)]
    nodes = [functools.reduce(np.add, rows[first : first + local]) for first in range(0, len(rows), local)]
    rounded = [node if name == "float16" else node.astype(dtype).astype(wide) for node in nodes]
    return functools.reduce(np.add, rounded).astype(dtype)


def algorithms_of(comm: Communicator, collective: str) -> list[dict[str, Any]]:
    named = [{"algorithm": name} for name in (None, *comm.collectives.algorithms(collective))]
    policies = [{"cta_policy": "efficiency"}, {"symmetric": True}]
    return [*named, *policies]


@pytest.mark.parametrize("name", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_row_has_the_same_bits_in_every_batch(ranks: Ranks, world: tuple[int, int], name: str) -> None:
    """Tries all_reduce and reduce with every algorithm that the communicator accepts, at several offsets, in place and
    out of place.
    """
    want = expected_sums(ranks, name, world[1])

    def body(comm: Communicator) -> None:
        own = rows_of(comm.rank, name)
        for options in algorithms_of(comm, "all_reduce"):
            for batch in BATCHES:
                first = batch // 2  # index of the batch's first row
                batch_rows = np.roll(own[:batch], -first, 0).ravel()
                for offset in (0, 3):  # the number of elements in memory before the batch
                    x = on_device(comm, np.concatenate([np.zeros(offset, own.dtype), batch_rows]))[offset:]
                    out = on_device(comm, np.zeros(batch_rows.shape, own.dtype))
                    comm.all_reduce(x, out=out, **options)
                    comm.all_reduce(x, **options)
                    barrier(comm)
                    for result in (out, x):
                        got = np.roll(on_host(result).reshape(batch, WIDTH), first, 0)
                        assert got.tobytes() == want[:batch].tobytes(), (options, batch, offset, result is x)
        root = comm.world_size - 1
        reduced = comm.reduce(on_device(comm, own), "sum", root)
        barrier(comm)
        assert comm.rank != root or on_host(reduced).tobytes() == want.tobytes()

    ranks.run(body)


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_reduce_scatter_adds_in_the_order_of_ranks(ranks: Ranks, world: tuple[int, int], name: str) -> None:
    want = expected_sums(ranks, name, ranks.world_size)

    def body(comm: Communicator) -> None:
        own = rows_of(comm.rank, name)
        for options in algorithms_of(comm, "reduce_scatter"):
            for batch in (1, 5, max(BATCHES) // comm.world_size):
                rows = slice(comm.rank * batch, (comm.rank + 1) * batch)
                got = comm.reduce_scatter(on_device(comm, own[: batch * comm.world_size]), **options)
                barrier(comm)
                assert on_host(got).tobytes() == want[rows].tobytes(), (options, batch)

    ranks.run(body)


def test_algorithms_of_another_order_are_refused(ranks: Ranks, world: tuple[int, int]) -> None:
    between_nodes = 1 < world[1] < world[0]

    def body(comm: Communicator) -> None:
        x = on_device(comm, np.ones(3, np.float32))
        works = comm.collectives.algorithms()
        assert works == ("hierarchical",) if between_nodes else {"two_shot", "proxy"} <= {*works}
        packets = ("recursive_doubling",) if comm.world_size == comm.local_world_size > 2 else ()
        for name in ("ring", *(("two_shot", "proxy") if between_nodes else packets)):
            with pytest.raises(ArgumentError, match=rf"^algorithm: {name} needs invariant=False, .* expected one of "):
                comm.all_reduce(x, algorithm=name)
        if between_nodes:
            with pytest.raises(ArgumentError, match=r"^cta_policy: 'zero' needs invariant=False, "):
                comm.all_reduce(x, cta_policy="zero")
        comm.collectives.selector = comm.collectives.selector.with_table("all_reduce", SizeTable((), "ring"))
        # The table names "ring", but this call must use another algorithm, because "ring" is not invariant.
        assert (on_host(comm.all_reduce(x)) == comm.world_size).all()
        comm.collectives.selector = comm.collectives.defaults

    ranks.run(body)


def test_a_plan_that_reduces_is_refused() -> None:
    def body(comm: Communicator) -> None:
        x, plan = on_device(comm, np.ones(8, np.float32)), ExecutionPlan.load(all_reduce_by_reads(2))
        for call in (lambda: comm.all_reduce(x, algorithm=plan), lambda: comm.execute(plan, x, out=x)):
            with pytest.raises(ArgumentError, match=r"^algorithm: .* reduces; an invariant communicator expected"):
                call()
        tables: Selector = comm.collectives.selector.with_table("all_reduce", SizeTable((), plan))
        with pytest.raises(ArgumentError, match=r"^selector: .* reduces; an invariant communicator expected"):
            comm.collectives.selector = tables

    run_ranks(2, body, invariant=True)


def test_a_plan_of_another_collective_that_reduces_is_refused() -> None:
    document = {**all_reduce_by_reads(2), "collective": "custom"}

    def body(comm: Communicator) -> None:
        x = on_device(comm, np.ones(8, np.float32))
        with pytest.raises(ArgumentError, match=r"^algorithm: .* reduces; an invariant communicator expected"):
            comm.execute(ExecutionPlan.load(document), x, out=x)
        moved = comm.execute(ExecutionPlan.load(all_gather(2)), x)
        barrier(comm)
        assert on_host(moved).tolist() == [1] * 16

    run_ranks(2, body, invariant=True)


@pytest.mark.parametrize("world", [world for world in WORLDS if 1 < world[1] < world[0]], ids=str)
def test_the_policy_zero_contradicts_invariance_between_nodes(world: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match=r"^cta_policy: 'zero' needs invariant=False, .*; expected another policy$"):
        run_ranks(world[0], lambda _: None, local_world_size=world[1], invariant=True, cta_policy="zero")


def test_parts_of_an_invariant_communicator_are_invariant(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_invariant(comm: Communicator) -> bool:
        return "ring" not in comm.collectives.algorithms()

    def body(comm: Communicator) -> None:
        assert is_invariant(comm)
        with comm.split([0, 1]) as part, comm.split([0, 1], invariant=False) as other:
            assert (is_invariant(part), is_invariant(other)) == (True, False)
        with comm.shrink() as shrunk:
            assert is_invariant(shrunk)

    monkeypatch.setenv("PROXYCCL_INVARIANT", "1")
    run_ranks(2, body)
    assert run_ranks(2, is_invariant, invariant=False) == [False, False]
    monkeypatch.setenv("PROXYCCL_INVARIANT", "yes")
    with pytest.raises(ArgumentError, match=r"^PROXYCCL_INVARIANT: must be 0 or 1, not 'yes'$"):
        run_ranks(1, lambda _: None)
