"""The expert-parallel layer: every output and descriptor field against the oracle, and what it refuses."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from proxyccl import (
    ArgumentError,
    Array,
    CapacityError,
    ClosedError,
    Communicator,
    DispatchCombineContext,
    EPAll2AllLayer,
    EPConfig,
    MismatchError,
    WaitTimeoutError,
)
from proxyccl.channels.expert_parallel import workspace
from proxyccl.device._native import ffi
from proxyccl.device.kernel import Launch
from support import running
from support.device_arrays import on_device, on_host
from support.devices import most_ranks, runtime_with_blocks
from support.expert_oracle import Routing
from support.paths import PROGRAMS
from support.ranks import Ranks
from support.reference import numpy_dtype, poison, unit_roundoff
from support.running import TIMEOUT, run_mpi

run_ranks = functools.partial(running.run_ranks, make_runtime=runtime_with_blocks)
Values = NDArray[Any]
DTYPES = ("float32", "float64", "float16", "bfloat16")
ROUTINGS = ("uniform", "one expert", "one rank", "mostly dropped", "all dropped", "an expert several times")


@dataclass(frozen=True)
class Case:
    """A configuration, and a seed for the values that all ranks derive from it.

    Attributes:
        tokens: number of tokens of each rank.
        local_world_size: ranks of a node; None for all.
        routing: how the experts are chosen.
        scatter: None, "sorted" (what the layer does by itself) or "random": the full scatter indices that are given.
        spare_tokens: how much larger max_tokens is than the most tokens.
        spare_rows: None for outputs of the exact size, else how many more rows they have than the most that come.
        halves: whether dispatch and combine are called in two halves.
    """

    tokens: tuple[int, ...]
    experts_per_rank: int = 2
    topk: int = 2
    hidden: int = 8
    dtype: str = "float32"
    local_world_size: int | None = None
    routing: str = "uniform"
    scatter: str | None = None
    local_combine: bool = False
    spare_tokens: int = 0
    spare_rows: int | None = None
    halves: bool = False
    num_sm: int = 3
    seed: int = 0

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    @property
    def experts(self) -> int:
        return self.ranks * self.experts_per_rank

    @property
    def max_tokens(self) -> int:
        return max(1, *self.tokens) + self.spare_tokens

    def layer(self, comm: Communicator, **options: Any) -> EPAll2AllLayer:
        return EPAll2AllLayer(
            comm,
            self.max_tokens,
            self.hidden,
            self.topk,
            comm.rank,
            self.experts,
            comm.local_world_size,
            comm.world_size,
            **{
                "dtype": self.dtype,
                "num_sm": self.num_sm,
                "enable_local_combine": self.local_combine,
                **options,
            },
        )

    def expert_ids(self, rank: int) -> NDArray[np.int32]:
        rng = np.random.default_rng((self.seed, rank, 1))
        shape = (self.tokens[rank], self.topk)
        dropped = np.full(shape, self.experts)
        chosen = {
            "uniform": rng.integers(0, self.experts + 1, shape),
            "one expert": np.full(shape, self.experts // 2),
            "one rank": rng.integers(0, self.experts_per_rank, shape),
            "mostly dropped": np.where(rng.random(shape) < 0.9, dropped, rng.integers(0, self.experts, shape)),
            "all dropped": dropped,
            "an expert several times": np.repeat(rng.integers(0, self.experts, (shape[0], 1)), self.topk, axis=1),
        }[self.routing]
        return np.ascontiguousarray(chosen, np.int32)


class Plan:
    """What all ranks of a case put in, and what each must get.

    Attributes:
        most_rows: the fixed maximum of rows; None in the exact mode.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        ids = tuple(case.expert_ids(rank) for rank in range(case.ranks))
        self.routing = Routing(ids, case.experts, case.local_world_size or case.ranks, case.max_tokens)
        self.scatter: NDArray[np.int32] | None = None
        if case.scatter is not None:
            flat = self.routing.expert
            self.scatter = flat.argsort(kind="stable").argsort(kind="stable").astype(np.int32).reshape(-1, case.topk)
        if case.scatter == "random":
            self.scatter = self.routing.random_scatter(np.random.default_rng((case.seed, 7)))
        self.routing = replace(self.routing, scatter=self.scatter)
        self.most_rows = None if case.spare_rows is None else max(1, *self.routing.rows) + case.spare_rows

    @functools.cached_property
    def inputs(self) -> list[Values]:
        """Any bytes: what no arithmetic touches arrives as it was, were it no number."""
        return [self._bytes(tokens, rank, 0) for rank, tokens in enumerate(self.case.tokens)]

    @functools.cached_property
    def others(self) -> list[Values]:
        return [self._bytes(tokens, rank, 4) for rank, tokens in enumerate(self.case.tokens)]

    @functools.cached_property
    def weights(self) -> list[Values]:
        rngs = [np.random.default_rng((self.case.seed, rank, 2)) for rank in range(self.case.ranks)]
        return [rng.normal(size=ids.shape).astype(np.float32) for rng, ids in zip(rngs, self.routing.ids, strict=True)]

    @functools.cached_property
    def results(self) -> list[Values]:
        """What the experts of each rank make of their rows: anything, since combine is linear in it."""
        rngs = [np.random.default_rng((self.case.seed, rank, 3)) for rank in range(self.case.ranks)]
        return [
            rng.normal(size=(rows, self.case.hidden)).astype(numpy_dtype(self.case.dtype))
            for rng, rows in zip(rngs, self.routing.rows, strict=True)
        ]

    @functools.cached_property
    def scales(self) -> list[Values]:
        """Weights of rows whose products are exact, so that it is no matter whether a sum is fused with them."""
        rngs = [np.random.default_rng((self.case.seed, rank, 5)) for rank in range(self.case.ranks)]
        powers = [np.ldexp(1.0, rng.integers(-3, 4, rows)) for rng, rows in zip(rngs, self.routing.rows, strict=True)]
        signs = [rng.choice([-1.0, 1.0], rows) for rng, rows in zip(rngs, self.routing.rows, strict=True)]
        return [(power * sign).astype(np.float32) for power, sign in zip(powers, signs, strict=True)]

    @functools.cached_property
    def rows(self) -> list[Values]:
        return self.routing.dispatch(self.inputs)

    @functools.cached_property
    def other_rows(self) -> list[Values]:
        return self.routing.dispatch(self.others)

    @functools.cached_property
    def row_weights(self) -> list[Values]:
        return self.routing.rows_from(self.weights)

    @functools.cached_property
    def combined(self) -> list[Values]:
        return self.routing.combine(self.results, local_combine=self.case.local_combine)

    @functools.cached_property
    def scaled(self) -> list[Values]:
        return self.routing.combine(self.results, self.scales, local_combine=self.case.local_combine)

    def _bytes(self, rows: int, rank: int, what: int) -> Values:
        dtype = numpy_dtype(self.case.dtype)
        rng = np.random.default_rng((self.case.seed, rank, what))
        return rng.integers(0, 256, (rows, self.case.hidden * dtype.itemsize), np.uint8).view(dtype)


def plan_of(case: Case) -> Plan:
    """The plan, all of it made: ranks that are threads share it."""
    plan = Plan(case)
    for name in ("rows", "other_rows", "row_weights", "combined", "scaled"):
        getattr(plan, name)
    return plan


def same(got: Any, expected: Values, what: str) -> None:
    """Equal bytes, and shape and type."""
    values = on_host(got)
    assert (values.dtype, values.shape) == (expected.dtype, expected.shape), what
    if values.tobytes() != expected.tobytes():
        wrong = np.argwhere(values != expected)
        raise AssertionError(f"{what}: {len(wrong)} of {expected.size} differ, first at {wrong[:1].tolist()}")


def same_numbers(got: Any, expected: Values, what: str) -> None:
    """Equal numbers, in which the zeros of both signs are one."""
    same(on_host(got) + np.zeros(1, expected.dtype), expected + np.zeros(1, expected.dtype), what)


def same_rows(got: Any, expected: Values, most: int | None, what: str) -> None:
    """The rows that came are the expected ones, and there are `most` rows, if that is given."""
    assert most is None or on_host(got).shape[0] == most, what
    same(got if most is None else on_host(got)[: len(expected)], expected, what)


def same_layout(desc: Any, plan: Plan, rank: int) -> None:
    """All fields of the descriptor; of those by row, the rows that came."""
    expected = plan.routing.layout(rank)
    for field in fields(expected):
        got, want = getattr(desc, field.name), getattr(expected, field.name)
        if want is None or isinstance(want, int):
            assert got == want, field.name
        elif field.name.startswith("skipped"):
            same_rows(got, want, plan.most_rows, field.name)
        else:
            same(got, want, field.name)


def placed(comm: Communicator, values: Values, rows: int | None = None) -> Any:
    """The values behind a row of something else, so that odd rows are not aligned; and in front of others, if any."""
    before, behind = 1, 0 if rows is None else rows - len(values)
    padded = np.full((before + len(values) + behind, *values.shape[1:]), 7, values.dtype)
    padded[before : before + len(values)] = values
    return on_device(comm, padded)[before:]


def dispatch_of(layer: EPAll2AllLayer, plan: Plan, comm: Communicator, **options: Any) -> Any:
    """The case's dispatch with weights."""
    rank = comm.rank
    arrays = [placed(comm, array) for array in (plan.inputs[rank], plan.routing.ids[rank], plan.weights[rank])]
    scatter = None if plan.scatter is None else placed(comm, plan.scatter)
    if plan.case.halves:
        return layer.dispatch_recv(layer.dispatch_send(*arrays, scatter, **options))
    return layer.dispatch(*arrays, scatter, **options)


def combine_of(layer: EPAll2AllLayer, plan: Plan, rows: Any, desc: Any, weights: Any = None, out: Any = None) -> Any:
    if plan.case.halves:
        return layer.combine_recv(layer.combine_send(rows, desc, weights=weights), out=out)
    return layer.combine(rows, desc, weights=weights, out=out)


def check_layer(comm: Communicator, plan: Plan, layer: EPAll2AllLayer) -> None:
    """Every operation once; on the host with numpy's own arrays."""
    rank, most = comm.rank, plan.most_rows
    count = plan.routing.rows[rank]
    rows, weights, desc = dispatch_of(layer, plan, comm)
    same_rows(rows, plan.rows[rank], most, "output")
    same_rows(weights, plan.row_weights[rank], most, "weights")
    same_layout(desc, plan, rank)
    if most is not None:
        assert on_host(desc.num_recv_tokens).tolist() == [count]

    results, scales = placed(comm, plan.results[rank], most), placed(comm, plan.scales[rank], most)
    same_numbers(combine_of(layer, plan, results, desc), plan.combined[rank], "combine")
    expected = plan.scaled[rank]
    guarded = poison((len(expected) + 2) * plan.case.hidden, expected.dtype).reshape(-1, plan.case.hidden)
    edges = guarded[[0, -1]].tobytes()
    base = on_device(comm, guarded)
    out = base[1 : 1 + len(expected)]
    assert combine_of(layer, plan, results, desc, scales, out) is out
    same_numbers(out, expected, "weighted combine")
    assert on_host(base)[[0, -1]].tobytes() == edges, "wrote outside the array"
    again = layer.redispatch(placed(comm, plan.others[rank]), desc)
    same_rows(again, plan.other_rows[rank], most, "redispatch")
    if most is not None:
        layer.check()


def check(comm: Communicator, plan: Plan) -> None:
    with plan.case.layer(comm, max_recv_tokens=plan.most_rows) as layer:
        check_layer(comm, plan, layer)


# -- the oracle itself, worked by hand ---


def test_the_oracle_gives_what_was_worked_out_by_hand() -> None:
    """Two nodes of one rank; experts 0 and 1 are rank 0's, 2 and 3 are rank 1's, 4 drops."""
    ids = np.array([[0, 2], [2, 3], [1, 1]], np.int32), np.array([[3, 4], [0, 2]], np.int32)
    routing = Routing(ids, experts=4, local_world_size=1, max_tokens=4)
    inputs = [np.array([[10.0], [11.0], [12.0]]), np.array([[20.0], [21.0]])]
    assert [rows[:, 0].tolist() for rows in routing.dispatch(inputs)] == [[10, 21, 12, 12], [10, 11, 21, 11, 20]]
    assert [array[:, 0].tolist() for array in routing.combine(routing.dispatch(inputs))] == [[20, 22, 24], [20, 42]]

    layout = routing.layout(0)
    assert layout.num_dispatch_token_cur_rank == 3
    assert layout.num_input_tokens_per_rank.tolist() == [3, 2]
    assert layout.send_reqs_recv_tensor is not None
    assert layout.send_reqs_recv_tensor.tolist() == [
        [[0, 2, -1, -1], [1, 3, -1, -1]],
        [[1, -1, -1, -1], [2, -1, -1, -1]],
    ]
    assert layout.topk_indices_tensor.tolist() == [
        [[0, 2], [2, 3], [1, 1], [-1, -1]],
        [[3, 4], [0, 2], [-1, -1], [-1, -1]],
    ]
    assert layout.token_dst_scatter_idx.tolist() == [
        [[0, 0], [1, 3], [2, 3], [-1, -1]],
        [[-1, -1], [1, -1], [-1, -1], [-1, -1]],
    ]
    assert layout.skipped_token_mapping_indices.tolist() == [0, 1, 2, 2]
    assert layout.skipped_token_topk_mapping_indices.tolist() == [[0, -1], [1, -1], [2, 3], [-1, -1]]


def test_the_oracle_rounds_once_on_one_node_and_twice_by_parts() -> None:
    """Half precision has only even numbers at 2048."""
    ids = np.array([[0, 1, 0]], np.int32), np.empty((0, 3), np.int32)
    rows = [np.array([[2048], [1]], np.float16), np.array([[1]], np.float16)]
    for local_world_size, local_combine, total in ((2, False, 2050), (2, True, 2048), (1, False, 2048)):
        routing = Routing(ids, experts=2, local_world_size=local_world_size, max_tokens=1)
        assert routing.combine(rows, local_combine=local_combine)[0].tolist() == [[total]]


def test_the_oracle_takes_the_scatter_indices_of_a_sort() -> None:
    plan = plan_of(Case((9, 0, 14), topk=3, scatter="sorted"))
    own = replace(plan.routing, scatter=None)
    assert np.array_equal(plan.routing.row, own.row)
    other = replace(own, scatter=own.random_scatter(np.random.default_rng(0)))
    assert not np.array_equal(other.row, own.row)
    for mine, theirs in zip(own.dispatch(plan.inputs), other.dispatch(plan.inputs), strict=True):
        assert sorted(map(bytes, mine)) == sorted(map(bytes, theirs))


# -- worlds: links, nodes and sizes ---

WORLDS: list[tuple[int, dict[str, int]]] = [(size, {}) for size in (1, 2, 3, 5, 8)]
WORLDS += [(2, {"local_world_size": 1}), (4, {"local_world_size": 1}), (6, {"local_world_size": 2})]
WORLDS += [(4, {"local_world_size": 2, "fifos": 2, "proxy_threads": 2, "fifo_size": 4})]
WORLDS += [(3, {"announced_slots": 0})]  # one node, whose ranks tell each other counts however few they are
WORLDS += [(4, {"few_tokens": 0})]  # … and some of whose blocks only send


def world_name(world: tuple[int, dict[str, int]]) -> str:
    size, options = world
    return "-".join([str(size), *(f"{name}{value}" for name, value in options.items())])


class World:
    """Ranks, how many of them are a node, and what is otherwise in the module `workspace` for them."""

    def __init__(self, ranks: Ranks, local_world_size: int, constants: dict[str, int]) -> None:
        self.ranks = ranks
        self.local_world_size = local_world_size
        self.constants = constants

    @property
    def world_size(self) -> int:
        return self.ranks.world_size

    @property
    def one_node(self) -> bool:
        return self.local_world_size == self.world_size

    def check(self, case: Case) -> None:
        plan = plan_of(replace(case, local_world_size=self.local_world_size))
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.constants.items():
                patch.setattr(workspace, name, value)
            self.ranks.run(lambda comm: check(comm, plan))


@pytest.fixture(scope="module", params=[world for world in WORLDS if world[0] <= most_ranks()], ids=world_name)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    size, options = request.param[0], dict(request.param[1])
    constants = {name.upper(): options.pop(name) for name in {"announced_slots", "few_tokens"} & options.keys()}
    with Ranks(size, make_runtime=runtime_with_blocks, **options) as ranks:
        yield World(ranks, options.get("local_world_size", size), constants)


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


@st.composite
def cases(draw: st.DrawFn, world: World) -> Case:
    ranks = world.world_size
    return Case(
        tokens=tuple(draw(st.lists(st.integers(0, 16), min_size=ranks, max_size=ranks))),
        spare_tokens=draw(st.sampled_from([0, 0, 5])),
        experts_per_rank=draw(st.sampled_from([1, 2, 3, 8, 64])),
        topk=draw(st.integers(1, 16)),
        hidden=draw(st.sampled_from([1, 2, 3, 7, 16, 33, 128])),
        dtype=draw(st.sampled_from(DTYPES)),
        routing=draw(st.sampled_from(ROUTINGS)),
        scatter=draw(st.sampled_from([None, "sorted", "random"])),
        local_combine=world.one_node and draw(st.booleans()),
        spare_rows=draw(st.sampled_from([None, None, 0, 5])),
        halves=draw(st.booleans()),
        num_sm=draw(st.sampled_from([1, 2, 5, 20])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_random_configurations(world: World, data: st.DataObject) -> None:
    world.check(data.draw(cases(world)))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings(world: World, routing: str) -> None:
    tokens = tuple(17 - 2 * rank for rank in range(world.world_size))
    world.check(Case(tokens, experts_per_rank=3, topk=4, hidden=24, routing=routing, dtype="bfloat16"))


def test_no_tokens_anywhere(world: World) -> None:
    world.check(Case((0,) * world.world_size))


def test_tokens_on_one_rank_alone(world: World) -> None:
    world.check(Case((*[0] * (world.world_size - 1), 9), topk=3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("local_combine", [False, True])
def test_local_combine(pair: Ranks, dtype: str, local_combine: bool) -> None:
    plan = plan_of(Case((12, 15), topk=8, hidden=40, dtype=dtype, local_combine=local_combine))
    other = plan.routing.combine(plan.results, local_combine=not local_combine)
    assert not np.array_equal(plan.combined[0], other[0])  # or the test could not tell them apart
    pair.run(lambda comm: check(comm, plan))


@pytest.mark.parametrize(
    "case",
    [
        Case((700, 1500, 0), hidden=512, topk=3),
        Case((2, 1, 1), hidden=800_001, dtype="float16", topk=1),
        Case((1, 2, 2), hidden=400_000, topk=1, experts_per_rank=1),
        Case((40, 40, 40), hidden=16, experts_per_rank=64, topk=16),
        Case((1100, 1, 600), hidden=3, topk=16, num_sm=1),
        Case((3, 5, 2), hidden=9001, dtype="bfloat16", topk=8),
    ],
    ids=["many tokens", "long rows", "one expert a rank", "many experts", "one block", "rows in pieces"],
)
@pytest.mark.parametrize(("local_world_size", "local_combine"), [(3, False), (3, True), (1, False)])
def test_sizes(case: Case, local_world_size: int, local_combine: bool) -> None:
    plan = plan_of(replace(case, local_world_size=local_world_size, local_combine=local_combine))
    run_ranks(3, lambda comm: check(comm, plan), local_world_size=local_world_size)


@pytest.mark.parametrize(
    ("case", "announced"),
    [
        (Case((40, 9), topk=3), True),
        (Case((40, 9), topk=3, spare_tokens=1), False),
        (Case((16, 15), topk=16, num_sm=1), True),
        (Case((17, 15), topk=16, num_sm=1), False),
        (Case((64, 9), topk=8, hidden=4, experts_per_rank=512), True),
        (Case((64, 9), topk=8, hidden=4, experts_per_rank=513), False),
    ],
    ids=["slots", "too many slots", "a segment's", "too many of a segment", "experts", "too many experts"],
)
@pytest.mark.parametrize("routing", ["uniform", "one expert"])
def test_expert_ids_are_announced_where_a_block_can_keep_them(
    monkeypatch: pytest.MonkeyPatch, case: Case, announced: bool, routing: str
) -> None:
    monkeypatch.setattr(workspace, "ANNOUNCED_SLOTS", 240 if case.topk == 3 else 1024)
    plan = plan_of(replace(case, routing=routing))

    def body(comm: Communicator) -> None:
        with plan.case.layer(comm) as layer:
            assert bool(layer.ctx.workspace.experts.id_packets) is announced
            check_layer(comm, plan, layer)
            check_layer(comm, plan, layer)

    run_ranks(2, body)


# -- call after call ---


@pytest.mark.host_only(reason="it reaches into device memory")
@pytest.mark.parametrize("start", [2**31 - 3, 2**32 - 4])
def test_results_stay_right_when_the_flags_of_announcements_wrap(start: int) -> None:
    plans = steps(Case((9, 0, 14), topk=3), 8)

    def body(comm: Communicator) -> int:
        with plans[0].case.layer(comm) as layer:
            counters = ffi.cast("ProxycclExpertCounters *", layer.ctx.workspace.experts.counters)
            counters.routings = start
            comm.barrier()
            for plan in plans:
                check_layer(comm, plan, layer)
            return int(counters.routings)

    assert run_ranks(3, body) == [start + len(plans)] * 3


def steps(first: Case, count: int) -> list[Plan]:
    """One case again and again, with other values, ids and numbers of tokens, within the first's maximum."""
    most = first.max_tokens
    plans = [plan_of(first)]
    for step in range(1, count):
        tokens = tuple((number * (step % 4) // 3) for number in first.tokens)
        spare = most - max(1, *tokens)
        plans.append(plan_of(replace(first, tokens=tokens, spare_tokens=spare, seed=first.seed + step)))
    return plans


@pytest.mark.parametrize(("local_world_size", "most"), [(4, 30), (4, 100), (2, 30)])
def test_many_calls_in_a_row_with_other_numbers_of_tokens(local_world_size: int, most: int) -> None:
    plans = steps(Case((most, 7, 0, 16), hidden=20, topk=3, local_world_size=local_world_size), 8)

    def body(comm: Communicator) -> None:
        with plans[0].case.layer(comm) as layer:
            for plan in plans:
                check_layer(comm, plan, layer)
                check_layer(comm, plan, layer)

    run_ranks(4, body, local_world_size=local_world_size)


@pytest.mark.parametrize("local_world_size", [4, 2])
def test_two_layers_by_turns_on_one_communicator(local_world_size: int) -> None:
    one = steps(Case((12, 5, 9, 0), hidden=16, dtype="bfloat16", local_world_size=local_world_size), 4)
    other = steps(Case((3, 8, 0, 7), hidden=33, topk=5, experts_per_rank=1, local_world_size=local_world_size), 4)

    def body(comm: Communicator) -> None:
        with one[0].case.layer(comm) as first, other[0].case.layer(comm) as second:
            for mine, theirs in zip(one, other, strict=True):
                check_layer(comm, mine, first)
                comm.all_reduce(on_device(comm, np.ones(3, np.float32)))
                check_layer(comm, theirs, second)

    run_ranks(4, body, local_world_size=local_world_size)


@pytest.mark.parametrize("local_world_size", [4, 2])
def test_calls_in_two_halves_with_work_between(local_world_size: int) -> None:
    plans = steps(Case((11, 4, 0, 14), hidden=16, topk=3, local_world_size=local_world_size), 3)

    def body(comm: Communicator) -> None:
        rank = comm.rank
        with plans[0].case.layer(comm) as layer:
            for plan in plans:
                arrays = plan.inputs[rank], plan.routing.ids[rank], plan.weights[rank]
                sent = layer.dispatch_send(*(on_device(comm, array) for array in arrays))
                work = on_device(comm, np.full(2000, rank, np.float32))
                comm.all_reduce(work)
                rows, weights, desc = layer.dispatch_recv(sent)
                same(rows, plan.rows[rank], "output")
                same(weights, plan.row_weights[rank], "weights")
                same_layout(desc, plan, rank)
                sent = layer.combine_send(
                    on_device(comm, plan.results[rank]), desc, weights=on_device(comm, plan.scales[rank])
                )
                comm.all_reduce(work)
                same_numbers(layer.combine_recv(sent), plan.scaled[rank], "combine")
                assert np.all(on_host(work) == 24)

    run_ranks(4, body, local_world_size=local_world_size)


@pytest.mark.parametrize(("local_world_size", "most"), [(2, 14), (2, 120), (1, 14)])
def test_a_dispatch_and_a_combine_may_be_under_way_at_once(local_world_size: int, most: int) -> None:
    """As when the halves of a batch overlap: the next dispatch is sent before the last combine is received."""
    plans = steps(Case((11, most), hidden=16, topk=3, local_world_size=local_world_size), 4)

    def body(comm: Communicator) -> None:
        rank = comm.rank
        with plans[0].case.layer(comm) as layer:
            combining: Any = None
            before: Plan | None = None
            for plan in plans:
                arrays = plan.inputs[rank], plan.routing.ids[rank]
                dispatching = layer.dispatch_send(*(on_device(comm, array) for array in arrays))
                if before is not None:
                    same_numbers(layer.combine_recv(combining), before.combined[rank], "combine")
                rows, weights, desc = layer.dispatch_recv(dispatching)
                assert weights is None
                same(rows, plan.rows[rank], "output")
                combining, before = layer.combine_send(on_device(comm, plan.results[rank]), desc), plan
            assert before is not None
            same_numbers(layer.combine_recv(combining), before.combined[rank], "combine")

    run_ranks(2, body, local_world_size=local_world_size)


@pytest.mark.parametrize(("local_world_size", "most"), [(2, 12), (2, 120), (1, 12)])
def test_a_descriptor_serves_any_number_of_calls(local_world_size: int, most: int) -> None:
    """As gradients ask for: they come when the whole batch has gone forward, the last call's first."""
    plans = steps(Case((most, 9), topk=3, local_world_size=local_world_size), 3)

    def body(comm: Communicator) -> None:
        rank = comm.rank
        with plans[0].case.layer(comm) as layer:
            descs = [dispatch_of(layer, plan, comm)[2] for plan in plans]
            for _ in range(2):
                for plan, desc in reversed(list(zip(plans, descs, strict=True))):
                    combined = layer.combine(on_device(comm, plan.results[rank]), desc)
                    same_numbers(combined, plan.combined[rank], "combine")
                    again = layer.redispatch(on_device(comm, plan.others[rank]), desc)
                    same(again, plan.other_rows[rank], "redispatch")
            for plan, desc in zip(plans, descs, strict=True):
                same_layout(desc, plan, rank)

    run_ranks(2, body, local_world_size=local_world_size)


def test_ep_barrier_all(world: World) -> None:
    case = Case((1,) * world.world_size)

    def body(comm: Communicator) -> None:
        with case.layer(comm) as layer:
            for intra_node_only in (False, True, True, False):
                layer.ep_barrier_all(intra_node_only=intra_node_only)
            stream = comm.runtime.create_stream()
            layer.ep_barrier_all(stream)
            comm.synchronize(stream)

    world.ranks.run(body)


# -- the caller's side ---


def test_weights_may_be_left_out(pair: Ranks) -> None:
    plan = plan_of(Case((4, 6)))

    def body(comm: Communicator) -> None:
        with plan.case.layer(comm) as layer:
            arrays = plan.inputs[comm.rank], plan.routing.ids[comm.rank]
            rows, weights, _ = layer.dispatch(*(on_device(comm, array) for array in arrays))
            assert weights is None
            same(rows, plan.rows[comm.rank], "output")

    pair.run(body)


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("local_world_size", [2, 1])
def test_weights_of_every_type(weight_dtype: str, local_world_size: int) -> None:
    plan = plan_of(Case((9, 6), topk=5, local_world_size=local_world_size))
    weights = [array.astype(numpy_dtype(weight_dtype)) for array in plan.weights]
    expected = plan.routing.rows_from(weights)

    def body(comm: Communicator) -> None:
        rank = comm.rank
        with plan.case.layer(comm, weight_dtype=weight_dtype) as layer:
            arrays = plan.inputs[rank], plan.routing.ids[rank], weights[rank]
            got = layer.dispatch(*(on_device(comm, array) for array in arrays))[1]
            same(got, expected[rank], "weights")

    run_ranks(2, body, local_world_size=local_world_size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weighted_combine_rounds_once(pair: Ranks, dtype: str) -> None:
    """Within the bound of its accumulation (two roundings a term) and of the one to the element type."""
    plan = plan_of(Case((16, 11), topk=6, hidden=64, dtype=dtype))
    rngs = [np.random.default_rng(rank) for rank in range(2)]
    factors = [rng.normal(size=rows).astype(np.float32) for rng, rows in zip(rngs, plan.routing.rows, strict=True)]
    products = [rows.astype(np.float64) * factor[:, None] for rows, factor in zip(plan.results, factors, strict=True)]
    terms = plan.routing.slots_from(products)

    def body(comm: Communicator) -> None:
        with plan.case.layer(comm) as layer:
            _, _, desc = dispatch_of(layer, plan, comm)
            results, weights = on_device(comm, plan.results[comm.rank]), on_device(comm, factors[comm.rank])
            got = on_host(layer.combine(results, desc, weights=weights)).astype(np.float64)
        exact, size = terms[comm.rank].sum(axis=1), np.abs(terms[comm.rank]).sum(axis=1)
        slack = 2 * plan.case.topk * unit_roundoff(np.dtype(np.float64 if dtype == "float64" else np.float32)) * size
        tiny = float(np.finfo(np.float16).smallest_subnormal)
        assert np.all(np.abs(got - exact) <= slack + unit_roundoff(numpy_dtype(dtype)) * (np.abs(exact) + slack) + tiny)

    pair.run(body)


@pytest.mark.parametrize("local_world_size", [3, 1])
def test_arrays_of_the_communicator_and_streams(local_world_size: int) -> None:
    plan = plan_of(Case((12, 5, 9), hidden=16, dtype="bfloat16", local_world_size=local_world_size))

    def body(comm: Communicator) -> None:
        def place(values: Values, dtype: str) -> Array:
            return comm.empty(values.shape, dtype).upload(values)

        rank, stream = comm.rank, comm.runtime.create_stream()
        tokens, ids = place(plan.inputs[rank], "bfloat16"), place(plan.routing.ids[rank], "int32")
        weights, results = place(plan.weights[rank], "float32"), place(plan.results[rank], "bfloat16")
        scales, others = place(plan.scales[rank], "float32"), place(plan.others[rank], "bfloat16")
        with plan.case.layer(comm) as layer:
            rows, row_weights, desc = layer.dispatch(tokens, ids, weights, stream=stream)
            combined = layer.combine(results, desc, stream=stream)
            scaled = layer.combine(results, desc, weights=scales, stream=stream)
            again = layer.redispatch(others, desc, stream=stream)
            comm.synchronize(stream)
            for array in (rows, row_weights, combined, scaled, again):
                assert isinstance(array, Array)
            same(rows, plan.rows[rank], "output")
            same(row_weights, plan.row_weights[rank], "weights")
            same_layout(desc, plan, rank)
            same_numbers(combined, plan.combined[rank], "combine")
            same_numbers(scaled, plan.scaled[rank], "weighted combine")
            same(again, plan.other_rows[rank], "redispatch")

    run_ranks(3, body, local_world_size=local_world_size)


@pytest.mark.parametrize("num_sm", [1, 2, 5])
@pytest.mark.parametrize("local_world_size", [2, 1])
def test_no_kernel_has_more_blocks_than_num_sm(
    monkeypatch: pytest.MonkeyPatch, num_sm: int, local_world_size: int
) -> None:
    plan = plan_of(Case((30, 21), hidden=64, topk=4, num_sm=num_sm, local_world_size=local_world_size))
    grids: list[Any] = []
    make = Launch.__init__

    def spy(self: Launch, kernel: Any, grid: Any, *arguments: Any) -> None:
        grids.append(grid)
        make(self, kernel, grid, *arguments)

    monkeypatch.setattr(Launch, "__init__", spy)
    run_ranks(2, lambda comm: check(comm, plan), local_world_size=local_world_size)
    assert grids
    assert max(int(np.prod(grid)) for grid in grids) <= num_sm


def test_a_finalized_layer_leaves_the_communicator_open(pair: Ranks) -> None:
    plan = plan_of(Case((4, 6)))

    def body(comm: Communicator) -> None:
        layer = plan.case.layer(comm)
        _, _, desc = dispatch_of(layer, plan, comm)
        layer.finalize()
        layer.finalize()
        results = on_device(comm, plan.results[comm.rank])
        for call in (
            lambda: dispatch_of(layer, plan, comm),
            lambda: layer.combine(results, desc),
            lambda: layer.redispatch(on_device(comm, plan.others[comm.rank]), desc),
            layer.ep_barrier_all,
        ):
            with pytest.raises(ClosedError):
                call()
        check(comm, plan)

    pair.run(body)


@pytest.mark.parametrize("local_world_size", [2, 1])
def test_a_layer_may_be_finalized_with_calls_under_way(local_world_size: int) -> None:
    plan = plan_of(Case((4, 6), local_world_size=local_world_size))

    def body(comm: Communicator) -> None:
        with plan.case.layer(comm) as layer:
            _, _, desc = dispatch_of(layer, plan, comm)
            layer.combine_send(on_device(comm, plan.results[comm.rank]), desc)
            layer.dispatch_send(*(on_device(comm, x[comm.rank]) for x in (plan.inputs, plan.routing.ids)))
        check(comm, plan)

    run_ranks(2, body, local_world_size=local_world_size)


@pytest.mark.parametrize("local_world_size", [2, 1])
def test_finalized_layers_give_back_what_they_took(local_world_size: int) -> None:
    """Ids of channels and memory are few."""
    plan = plan_of(Case((4, 6), local_world_size=local_world_size))

    def body(comm: Communicator) -> None:
        for _ in range(600):
            plan.case.layer(comm).finalize()
        check(comm, plan)

    run_ranks(2, body, local_world_size=local_world_size)


def test_a_forgotten_layer_keeps_what_its_peers_reach() -> None:
    """A rank may be done with a call before its peers are, and free nothing that they still write to."""
    plan = plan_of(Case((4, 6)))

    def body(comm: Communicator) -> None:
        workspace = weakref.ref(plan.case.layer(comm).ctx.workspace)
        gc.collect()
        assert workspace() is not None
        comm.close()
        gc.collect()
        assert workspace() is None

    run_ranks(2, body)


# -- groups, configuration and buffers ---


@pytest.mark.host_only(reason="with arrays of the host")
@pytest.mark.parametrize("local_world_size", [4, 2])
@pytest.mark.parametrize("kind", ["mpi", "torch"])
def test_ranks_as_processes(kind: str, local_world_size: int, tmp_path: Path) -> None:
    if kind == "torch":
        pytest.importorskip("torch")
    env = {"PROXYCCL_LOCAL_WORLD_SIZE": str(local_world_size)}
    program = PROGRAMS / "expert_parallel.py"
    result = run_mpi(4, program, kind, str(local_world_size), str(tmp_path / "meeting"), env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("correct") == 4


def config(comm: Communicator, **options: Any) -> EPConfig:
    values: dict[str, Any] = {
        "max_tokens": 8,
        "hidden": 5,
        "topk": 3,
        "num_experts": 6,
        "rank": comm.rank,
        "world_size": comm.world_size,
        "local_world_size": comm.local_world_size,
        "token_dtype": "float32",
        "weight_dtype": "float32",
        "offset_dtype": "int32",
    }
    return EPConfig(**{**values, **options})


@pytest.mark.parametrize("local_world_size", [2, 1])
def test_a_configuration_knows_its_experts_and_nodes(local_world_size: int) -> None:
    def body(comm: Communicator) -> None:
        made = config(comm)
        assert made.num_experts_per_rank == 3
        assert made.is_intra_node == (local_world_size == 2)
        with pytest.raises(FrozenInstanceError):
            made.hidden = 6  # type: ignore[misc]
        assert made == config(comm)
        assert made != config(comm, hidden=6)

    run_ranks(2, body, local_world_size=local_world_size)


def test_output_buffers_grow_and_weights_have_one_number_a_row(pair: Ranks) -> None:
    def body(comm: Communicator) -> None:
        context = DispatchCombineContext.create(config(comm), capacity=2, ep_group=comm)
        for rows in (1, 48, 300, 10):
            output, weights = context.reallocate_dispatch_output_buf(rows)
            assert output.shape[0] >= rows
            assert output.shape[1:] == (5,)
            assert weights.shape == output.shape[:1]
        context.finalize()
        comm.barrier()

    pair.run(body)


# -- a fixed maximum of rows ---


@pytest.mark.parametrize("local_world_size", [3, 1])
@pytest.mark.parametrize("spare", [0, 7])
@pytest.mark.parametrize("halves", [False, True])
def test_a_fixed_maximum(local_world_size: int, spare: int, halves: bool) -> None:
    case = Case((14, 0, 9), topk=3, hidden=12, local_world_size=local_world_size, routing="one expert", halves=halves)
    plans = steps(case, 4)
    most = max(max(plan.routing.rows) for plan in plans) + spare
    for plan in plans:
        plan.most_rows = most

    def body(comm: Communicator) -> None:
        with case.layer(comm, max_recv_tokens=most) as layer:
            for plan in plans:
                check_layer(comm, plan, layer)

    run_ranks(3, body, local_world_size=local_world_size)


@pytest.mark.parametrize(("local_world_size", "local_combine"), [(3, False), (3, True), (1, False)])
def test_rows_past_a_fixed_maximum_count_as_zero(local_world_size: int, local_combine: bool) -> None:
    case = Case((14, 3, 9), topk=4, hidden=12, local_world_size=local_world_size, local_combine=local_combine)
    plan = plan_of(case)
    rows = plan.routing.rows
    most = min(rows) + 1
    assert most < max(rows)  # some rank's rows don't fit

    def cut(values: Values) -> Values:
        there = values.copy()
        there[most:] = 0
        return there

    combined = plan.routing.combine([cut(values) for values in plan.results], local_combine=local_combine)
    scales = [cut(values) for values in plan.scales]
    scaled = plan.routing.combine(plan.results, scales, local_combine=local_combine)

    def body(comm: Communicator) -> None:
        rank = comm.rank

        def first(values: Values) -> Any:
            there = np.zeros((most, *values.shape[1:]), values.dtype)
            there[: min(most, len(values))] = values[:most]
            return on_device(comm, there)

        stream = comm.runtime.create_stream()
        with case.layer(comm, max_recv_tokens=most) as layer:
            for _ in range(2):
                output, weights, desc = dispatch_of(layer, plan, comm, stream=stream)
                comm.synchronize(stream)
                filled = min(most, rows[rank])
                assert on_host(desc.num_recv_tokens).tolist() == [filled]
                same(on_host(output)[:filled], plan.rows[rank][:filled], "output")
                same(on_host(weights)[:filled], plan.row_weights[rank][:filled], "weights")
                with pytest.raises(CapacityError) as caught:
                    layer.check()
                assert caught.value.needed == max(rows)
                layer.check()  # it was told once
                results = first(plan.results[rank])
                same_numbers(layer.combine(results, desc), combined[rank], "combine")
                got = layer.combine(results, desc, weights=first(plan.scales[rank]))
                same_numbers(got, scaled[rank], "weighted combine")
            if comm.runtime.name == "host":
                with pytest.raises(CapacityError):  # without a stream the call has waited, and knows
                    dispatch_of(layer, plan, comm)
        check(comm, plan)  # a layer without a maximum, on the same communicator

    run_ranks(3, body, local_world_size=local_world_size)


# -- what is refused ---


def refused(argument: str, call: Callable[[], object], match: str | None = None) -> None:
    with pytest.raises(ArgumentError, match=match) as caught:
        call()
    assert caught.value.argument == argument, caught.value


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("ep_group", object()),
        ("max_tokens", 0),
        ("max_tokens", 4.0),
        ("max_tokens", 2**31),
        ("hidden", -1),
        ("topk", 0),
        ("topk", 17),
        ("rank", 1),
        ("rank", -1),
        ("num_tot_experts", 0),
        ("num_tot_experts", 3),
        ("local_world_size", 0),
        ("local_world_size", 3),
        ("world_size", 4),
        ("dtype", "int32"),
        ("dtype", "float33"),
        ("weight_dtype", "int8"),
        ("num_sm", 0),
        ("max_recv_tokens", 0),
        ("max_recv_tokens", 1.5),
    ],
)
def test_wrong_constructor_arguments_are_refused_by_name(pair: Ranks, argument: str, value: Any) -> None:
    def body(comm: Communicator) -> None:
        good: dict[str, Any] = {
            "ep_group": comm,
            "max_tokens": 4,
            "hidden": 8,
            "topk": 2,
            "rank": comm.rank,
            "num_tot_experts": 4,
            "local_world_size": 2,
            "world_size": 2,
        }
        wrong = (comm.rank + 1) % 2 if (argument, value) == ("rank", 1) else value
        refused(argument, lambda: EPAll2AllLayer(**{**good, argument: wrong}))

    pair.run(body)


def test_local_combine_is_refused_across_nodes() -> None:
    def body(comm: Communicator) -> None:
        refused("enable_local_combine", lambda: Case((4, 4), local_combine=True).layer(comm))

    run_ranks(2, body, local_world_size=1)


@pytest.mark.parametrize(
    ("argument", "option", "value"),
    [
        ("hidden", "hidden", 9),
        ("max_tokens", "spare_tokens", 1),
        ("num_tot_experts", "experts_per_rank", 3),
        ("topk", "topk", 3),
        ("dtype", "dtype", "float64"),
        ("enable_local_combine", "local_combine", True),
    ],
)
def test_differing_configurations_are_refused_on_all(argument: str, option: str, value: Any) -> None:
    case = Case((3, 2, 1))
    plan = plan_of(case)

    def body(comm: Communicator) -> None:
        mine = replace(case, **{option: value}) if comm.rank == 1 else case
        refused(argument, lambda: mine.layer(comm))
        check(comm, plan)  # and nothing is broken

    run_ranks(3, body)


@pytest.mark.parametrize(("argument", "value"), [("weight_dtype", "float64"), ("max_recv_tokens", 20)])
def test_options_that_differ_between_ranks_are_refused_on_all(argument: str, value: Any) -> None:
    case = Case((3, 2, 1))
    plan = plan_of(case)

    def body(comm: Communicator) -> None:
        refused(argument, lambda: case.layer(comm, **({argument: value} if comm.rank == 1 else {})))
        check(comm, plan)

    run_ranks(3, body)


@pytest.mark.parametrize("local_world_size", [2, 1])
@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1, -(2**31)])
def test_an_expert_id_out_of_range_is_refused_on_all_ranks(local_world_size: int, bad: int) -> None:
    plan = plan_of(Case((6, 4), topk=3, local_world_size=local_world_size))

    def body(comm: Communicator) -> None:
        with plan.case.layer(comm) as layer:
            tokens, ids = on_device(comm, plan.inputs[comm.rank]), plan.routing.ids[comm.rank].copy()
            if comm.rank == 1:
                ids[2, 1] = ids[3, 0] = bad
            refused("exp_indices", lambda: layer.dispatch(tokens, on_device(comm, ids)), r"rank 1")
            check_layer(comm, plan, layer)

    run_ranks(2, body, local_world_size=local_world_size)


@pytest.mark.parametrize("local_world_size", [2, 1])
def test_with_a_fixed_maximum_a_bad_expert_id_is_told_later(local_world_size: int) -> None:
    case = Case((6, 4), topk=3, local_world_size=local_world_size, spare_rows=9)
    good = plan_of(case)
    plan = Plan(case)
    ids = [ids.copy() for ids in plan.routing.ids]
    ids[1][2, 1] = ids[1][3, 0] = case.experts
    plan.routing = replace(plan.routing, ids=tuple(ids))
    given = [array.copy() for array in ids]
    given[1][2, 1], given[1][3, 0] = -1, case.experts + 1

    def body(comm: Communicator) -> None:
        rank, stream = comm.rank, comm.runtime.create_stream()
        with case.layer(comm, max_recv_tokens=good.most_rows) as layer:
            arrays = plan.inputs[rank], given[rank], plan.weights[rank]
            rows, _, desc = layer.dispatch(*(on_device(comm, array) for array in arrays), stream=stream)
            comm.synchronize(stream)
            refused("exp_indices", layer.check, r"\[2, 1\] on rank 1")
            same_rows(rows, plan.rows[rank], good.most_rows, "output")
            combined = layer.combine(placed(comm, plan.results[rank], good.most_rows), desc)
            same_numbers(combined, plan.combined[rank], "combine")
            check_layer(comm, good, layer)

    run_ranks(2, body, local_world_size=local_world_size)


def test_wrong_arrays_are_refused_by_name() -> None:
    case = Case((5,), spare_tokens=3, hidden=4)
    plan = plan_of(case)

    def body(comm: Communicator) -> None:
        def ones(*shape: int, dtype: Any = np.float32) -> Any:
            return on_device(comm, np.ones(shape, dtype))

        def zeros(*shape: int, dtype: Any = np.int32) -> Any:
            return on_device(comm, np.zeros(shape, dtype))

        with case.layer(comm) as layer:
            tokens, ids, weights = ones(5, 4), zeros(5, 2), ones(5, 2)
            for argument, arguments in [
                ("input", (ones(9, 4), zeros(9, 2))),  # more than max_tokens
                ("input", (ones(5, 4, dtype=np.float64), ids)),
                ("input", (ones(5, 3), ids)),
                ("input", (ones(20), ids)),
                ("input", (np.ones((10, 4), np.float32)[::2], ids)),
                ("input", ([1.0], ids)),
                ("exp_indices", (tokens, zeros(5, 2, dtype=np.int64))),
                ("exp_indices", (tokens, ids[:4])),
                ("exp_indices", (tokens, zeros(5, 1))),
                ("weight", (tokens, ids, ones(5, 2, dtype=np.float64))),
                ("weight", (tokens, ids, weights[:4])),
                ("weight", (tokens, ids, ones(10))),
                ("full_scatter_indices", (tokens, ids, None, zeros(5, 2, dtype=np.int64))),
                ("full_scatter_indices", (tokens, ids, None, zeros(5, 1))),
            ]:
                refused(argument, lambda a=arguments: layer.dispatch(*a))
                refused(argument, lambda a=arguments: layer.dispatch_send(*a))
            refused("stream", lambda: layer.dispatch(tokens, ids, stream=object()))

            _, _, desc = layer.dispatch(tokens, ids, weights)
            rows = ones(10, 4)
            for argument, options in [
                ("input", {"input": ones(9, 4)}),
                ("input", {"input": ones(11, 4)}),
                ("input", {"input": ones(10, 5)}),
                ("input", {"input": ones(10, 4, dtype=np.float16)}),
                ("ep_a2a_layout_desc", {"ep_a2a_layout_desc": object()}),
                ("ep_a2a_layout_desc", {"ep_a2a_layout_desc": None}),
                ("weights", {"weights": ones(9)}),
                ("weights", {"weights": ones(11)}),
                ("weights", {"weights": ones(10, 1)}),
                ("weights", {"weights": ones(10, dtype=np.float64)}),
                ("out", {"out": ones(4, 4)}),
                ("out", {"out": ones(5, 4, dtype=np.float64)}),
                ("out", {"out": rows[:5]}),
                ("stream", {"stream": object()}),
            ]:
                good: dict[str, Any] = {"input": rows, "ep_a2a_layout_desc": desc}
                refused(argument, lambda o=options, g=good: layer.combine(**{**g, **o}))
            refused("input", lambda: layer.redispatch(ones(4, 4), desc))
            refused("input", lambda: layer.redispatch(ones(5, 4, dtype=np.float64), desc))
            refused("ep_a2a_layout_desc", lambda: layer.redispatch(tokens, object()))
            assert np.array_equal(on_host(layer.combine(rows, desc)), np.full((5, 4), 2))
            check_layer(comm, plan, layer)

    run_ranks(1, body)


def test_a_read_only_output_is_refused(pair: Ranks) -> None:
    plan = plan_of(Case((4, 6)))

    def body(comm: Communicator) -> None:
        with plan.case.layer(comm) as layer:
            _, _, desc = dispatch_of(layer, plan, comm)
            out = np.empty_like(plan.combined[comm.rank])
            out.flags.writeable = False
            refused("out", lambda: layer.combine(plan.results[comm.rank], desc, out=out))
            same_numbers(layer.combine(plan.results[comm.rank], desc), plan.combined[comm.rank], "combine")

    if pair.run(lambda comm: comm.runtime.name)[0] != "host":
        pytest.skip("numpy arrays are the host runtime's")
    pair.run(body)


@pytest.mark.parametrize("local_world_size", [2, 1])
@pytest.mark.parametrize("place", [-1, 12, 2**31 - 1, -(2**31), "another slot's"])
def test_scatter_indices_that_are_no_permutation_are_refused(place: int | str, local_world_size: int) -> None:
    case = Case((4, 2), routing="an expert several times", local_world_size=local_world_size)
    plan = plan_of(case)
    scatter = plan.routing.random_scatter(np.random.default_rng(0))
    scatter[1, 1] = scatter[1, 0] if isinstance(place, str) else place

    def body(comm: Communicator) -> str | None:
        with case.layer(comm) as layer:
            arrays = [on_device(comm, array) for array in (plan.inputs[comm.rank], plan.routing.ids[comm.rank])]
            refusal = None
            try:
                layer.dispatch(*arrays, None, on_device(comm, scatter))
                comm.synchronize()
                layer.check()
            except ArgumentError as error:
                refusal = error.argument
            check_layer(comm, plan, layer)
        return refusal

    refusals: list[str | None] = [None, None]
    refusals[int(plan.routing.rank[1 * case.topk + 1])] = "full_scatter_indices"
    assert run_ranks(2, body, local_world_size=local_world_size) == refusals


def test_a_descriptor_of_another_layer_is_refused(pair: Ranks) -> None:
    plan = plan_of(Case((4, 6)))

    def body(comm: Communicator) -> None:
        rank = comm.rank
        with plan.case.layer(comm) as layer, plan.case.layer(comm) as other:
            _, _, desc = dispatch_of(layer, plan, comm)
            results = on_device(comm, plan.results[rank])
            refused("ep_a2a_layout_desc", lambda: other.combine(results, desc))
            refused("ep_a2a_layout_desc", lambda: other.combine_send(results, desc))
            refused("ep_a2a_layout_desc", lambda: other.redispatch(on_device(comm, plan.others[rank]), desc))
            same_numbers(layer.combine(results, desc), plan.combined[rank], "combine")

    pair.run(body)


def test_a_second_send_while_one_is_under_way_is_refused(pair: Ranks) -> None:
    plan = plan_of(Case((4, 6)))

    def body(comm: Communicator) -> None:
        rank = comm.rank
        arrays = [on_device(comm, array) for array in (plan.inputs[rank], plan.routing.ids[rank])]
        results = on_device(comm, plan.results[rank])
        with plan.case.layer(comm) as layer:
            pending = layer.dispatch_send(*arrays)
            with pytest.raises(ArgumentError):
                layer.dispatch_send(*arrays)
            with pytest.raises(ArgumentError):
                layer.dispatch(*arrays)
            refused("pending", lambda: layer.dispatch_recv(object()))
            refused("pending", lambda: layer.combine_recv(pending))
            rows, _, desc = layer.dispatch_recv(pending)
            same(rows, plan.rows[rank], "output")
            refused("pending", lambda: layer.dispatch_recv(pending))

            pending = layer.combine_send(results, desc)
            with pytest.raises(ArgumentError):
                layer.combine_send(results, desc)
            with pytest.raises(ArgumentError):
                layer.combine(results, desc)
            refused("pending", lambda: layer.dispatch_recv(pending))
            same_numbers(layer.combine_recv(pending), plan.combined[rank], "combine")
            refused("pending", lambda: layer.combine_recv(pending))
            check_layer(comm, plan, layer)

    pair.run(body)


def test_another_call_on_another_rank_is_a_mismatch() -> None:
    plan = plan_of(Case((4, 4)))

    def body(comm: Communicator) -> None:
        layer = plan.case.layer(comm)
        _, _, desc = dispatch_of(layer, plan, comm)
        results, others = on_device(comm, plan.results[comm.rank]), on_device(comm, plan.others[comm.rank])

        def call() -> None:
            if comm.rank == 0:
                layer.redispatch(others, desc)
            else:
                layer.combine(results, desc)
            comm.synchronize()

        with pytest.raises(MismatchError) as caught:
            call()
        assert caught.value.argument == "collective"

    run_ranks(2, body)


def test_weights_on_some_ranks_alone_are_a_mismatch() -> None:
    plan = plan_of(Case((4, 4)))

    def body(comm: Communicator) -> None:
        layer = plan.case.layer(comm)
        arrays = [plan.inputs[comm.rank], plan.routing.ids[comm.rank], plan.weights[comm.rank]][: 2 + comm.rank]

        def call() -> None:
            layer.dispatch(*(on_device(comm, array) for array in arrays))
            comm.synchronize()

        with pytest.raises(MismatchError):
            call()

    run_ranks(2, body)


def test_a_missing_rank_is_waited_for_within_the_time_out() -> None:
    plan = plan_of(Case((4, 4)))
    given_up = threading.Event()

    def body(comm: Communicator) -> None:
        layer = plan.case.layer(comm)

        def call() -> None:
            dispatch_of(layer, plan, comm)
            comm.synchronize()

        if comm.rank == 1:
            assert given_up.wait(TIMEOUT)
        with pytest.raises(WaitTimeoutError) as caught:
            call()
        if comm.rank == 0:
            assert (caught.value.rank, caught.value.peer) == (0, 1)
            given_up.set()

    run_ranks(2, body, timeout=1.0)


def test_a_layer_of_a_closed_communicator_is_closed() -> None:
    plan = plan_of(Case((4,)))

    def body(comm: Communicator) -> None:
        layer = plan.case.layer(comm)
        comm.close()
        with pytest.raises(ClosedError):
            dispatch_of(layer, plan, comm)
        layer.finalize()

    run_ranks(1, body)


# -- gradients ---


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    """torch, whose tensors lie in the CPU's memory here."""
    return pytest.importorskip("torch")


HOST_TENSORS = pytest.mark.host_only(reason="with torch's tensors in the CPU's memory")


@HOST_TENSORS
@pytest.mark.parametrize("local_world_size", [3, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_torch(torch: ModuleType, dtype: str, local_world_size: int) -> None:
    plan = plan_of(Case((12, 0, 9), hidden=6, dtype=dtype, topk=3, local_world_size=local_world_size))

    def tensor(values: Values) -> Any:
        if values.dtype == numpy_dtype("bfloat16"):
            return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(values)

    def numpy(x: Any) -> Values:
        assert isinstance(x, torch.Tensor)
        return x.view(torch.int16).numpy().view(numpy_dtype("bfloat16")) if x.dtype == torch.bfloat16 else x.numpy()

    def body(comm: Communicator) -> None:
        rank = comm.rank
        with plan.case.layer(comm, dtype=getattr(torch, dtype), weight_dtype=torch.float32) as layer:
            arrays = plan.inputs[rank], plan.routing.ids[rank], plan.weights[rank]
            rows, weights, desc = layer.dispatch(*(tensor(array) for array in arrays))
            same(numpy(rows), plan.rows[rank], "output")
            same(numpy(weights), plan.row_weights[rank], "weights")
            results, scales = tensor(plan.results[rank]), tensor(plan.scales[rank])
            same_numbers(numpy(layer.combine(results, desc)), plan.combined[rank], "combine")
            same_numbers(numpy(layer.combine(results, desc, weights=scales)), plan.scaled[rank], "weighted combine")
            same(numpy(layer.redispatch(tensor(plan.others[rank]), desc)), plan.other_rows[rank], "redispatch")
            expected = plan.routing.layout(rank)
            assert desc.skipped_token_mapping_indices.tolist() == expected.skipped_token_mapping_indices.tolist()
            assert desc.token_dst_scatter_idx.tolist() == expected.token_dst_scatter_idx.tolist()

    run_ranks(3, body, local_world_size=local_world_size)


@HOST_TENSORS
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("local_world_size", [2, 1])
def test_gradients(torch: ModuleType, local_world_size: int, weighted: bool) -> None:
    """torch's gradcheck of dispatch, experts and combine, over all ranks at once.

    A rank's gradient needs the other ranks' part in the way back, so the checked function takes and gives the tensors
    of all ranks, and each rank's part of it runs in the rank's thread. It is linear in each tensor, so differences are
    as good over a long way; routing weights are in float32, and exact there.
    """
    plan = plan_of(Case((4, 3), hidden=3, topk=3, dtype="float64", local_world_size=local_world_size))
    rng = np.random.default_rng(0)

    def random(*shape: int) -> Any:
        return torch.from_numpy(rng.integers(-64, 64, shape) / 32).requires_grad_()

    with Ranks(2, local_world_size=local_world_size) as ranks:
        layers = ranks.run(plan.case.layer)

        def output(rank: int, x: Any, weight: Any, factor: Any) -> Any:
            ids = torch.from_numpy(plan.routing.ids[rank])
            rows, row_weights, desc = layers[rank].dispatch(x, ids, weight.float())
            if weighted:
                return layers[rank].combine(rows * factor, desc, weights=row_weights)
            return layers[rank].combine(rows * factor * row_weights[:, None], desc)

        class Everywhere(torch.autograd.Function):  # type: ignore[misc]
            @staticmethod
            def forward(context: Any, *tensors: Any) -> Any:
                context.leaves = [tensor.detach().requires_grad_() for tensor in tensors]

                def body(comm: Communicator) -> Any:
                    with torch.enable_grad():
                        return output(comm.rank, *context.leaves[3 * comm.rank : 3 * comm.rank + 3])

                context.outputs = ranks.run(body)
                return tuple(output.detach() for output in context.outputs)

            @staticmethod
            def backward(context: Any, *gradients: Any) -> Any:
                def body(comm: Communicator) -> Any:
                    leaves = context.leaves[3 * comm.rank : 3 * comm.rank + 3]
                    output = context.outputs[comm.rank]
                    return torch.autograd.grad(output, leaves, gradients[comm.rank], retain_graph=True)

                return tuple(gradient for part in ranks.run(body) for gradient in part)

        leaves = [
            leaf
            for rank, tokens in enumerate(plan.case.tokens)
            for leaf in (random(tokens, 3), random(tokens, 3), random(plan.routing.rows[rank], 3))
        ]
        assert torch.autograd.gradcheck(Everywhere.apply, leaves, eps=1 / 32)
