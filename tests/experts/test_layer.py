"""Compares every output and descriptor field of the expert-parallel layer with a reference in numpy (the oracle)."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxyccl import (
    Array,
    CapacityError,
    ClosedError,
    Communicator,
    DispatchCombineContext,
    EPConfig,
)
from proxyccl.channels.expert_parallel import geometry
from proxyccl.device._native import ffi
from proxyccl.device.kernel import Launch
from support.cases.expert_layer import (
    DTYPES,
    ROUTINGS,
    Case,
    Plan,
    Values,
    check,
    check_layer,
    dispatch_of,
    plan_of,
    run_ranks,
    same,
    same_layout,
    same_numbers,
)
from support.cases.expert_worlds import World, WorldOptions, open_world, params, world_name
from support.cases.reference import numpy_dtype, unit_roundoff
from support.device_arrays import on_device, on_host
from support.paths import PROGRAMS
from support.ranks import Ranks, collect_garbage
from support.running import run_mpi

# -- numbers of ranks and nodes ---

WORLDS: list[WorldOptions] = [(size, {}) for size in (1, 2, 3, 5, 8)]
WORLDS += [(2, {"local_world_size": 1}), (4, {"local_world_size": 1}), (6, {"local_world_size": 2})]
WORLDS += [(4, {"local_world_size": 2, "fifos": 2, "proxy_threads": 2, "fifo_size": 4, "batch_tokens": 3})]
WORLDS += [(3, {"announced_slots": 0})]  # With announced_slots=0, ranks of a node send each other counts.
WORLDS += [(4, {"few_tokens": 0})]  # With few_tokens=0, some blocks only send.
# These entries run only with --full, because other entries have one node of 5 ranks, and two nodes of one rank each.
REPRESENTED = [(8, {}), (4, {"local_world_size": 1})]


@pytest.fixture(scope="module", params=params(WORLDS, REPRESENTED), ids=world_name)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with open_world(request.param) as opened:
        yield opened


def check_in(world: World, case: Case) -> None:
    plan = plan_of(replace(case, local_world_size=world.local_world_size))
    world.run(lambda comm: check(comm, plan))


@st.composite
def cases(draw: st.DrawFn, world: World) -> Case:
    ranks = world.world_size
    alignment = draw(st.sampled_from([None, None, 1, 4, 7]))
    return Case(
        tokens=tuple(draw(st.lists(st.integers(0, 16), min_size=ranks, max_size=ranks))),
        spare_tokens=draw(st.sampled_from([0, 0, 5])),
        experts_per_rank=draw(st.sampled_from([1, 2, 3, 8, 64])),
        topk=draw(st.integers(1, 16)),
        hidden=draw(st.sampled_from([1, 2, 3, 7, 16, 33, 128])),
        dtype=draw(st.sampled_from(DTYPES)),
        routing=draw(st.sampled_from(ROUTINGS)),
        scatter=None if alignment else draw(st.sampled_from([None, "sorted", "random"])),
        alignment=alignment,
        local_combine=world.one_node and draw(st.booleans()),
        spare_rows=draw(st.sampled_from([None, None, 0, 5])),
        halves=draw(st.booleans()),
        num_sm=draw(st.sampled_from([1, 2, 5, 20])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def test_random_configurations(world: World, pytestconfig: pytest.Config) -> None:
    @settings(max_examples=12 if pytestconfig.getoption("--full") else 5, deadline=None)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        check_in(world, data.draw(cases(world)))

    check()


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings(world: World, routing: str) -> None:
    tokens = tuple(17 - 2 * rank for rank in range(world.world_size))
    check_in(world, Case(tokens, experts_per_rank=3, topk=4, hidden=24, routing=routing, dtype="bfloat16"))


@pytest.mark.parametrize("routing", ["one expert", "mostly dropped"])
def test_aligned_experts(world: World, routing: str) -> None:
    tokens = tuple(17 - 2 * rank for rank in range(world.world_size))
    check_in(world, Case(tokens, experts_per_rank=3, topk=4, hidden=24, routing=routing, alignment=8))


@pytest.mark.parametrize("alignment", [None, 4])
def test_weights_come_back_to_their_slots(world: World, alignment: int | None) -> None:
    case = Case((5,) * world.world_size, topk=3, alignment=alignment, local_world_size=world.local_world_size)
    plan = plan_of(case)

    def body(comm: Communicator) -> None:
        with plan.case.layer(comm) as layer:
            _, weights, desc = dispatch_of(layer, plan, comm)
            kept = plan.routing.ids[comm.rank] < plan.case.experts
            expected = np.where(kept, plan.weights[comm.rank], 0).astype(np.float32)
            same(layer.combine_weights(weights, desc), expected, "weights")

    world.run(body)


def test_no_tokens_anywhere(world: World) -> None:
    check_in(world, Case((0,) * world.world_size))


def test_tokens_on_one_rank_alone(world: World) -> None:
    check_in(world, Case((*[0] * (world.world_size - 1), 9), topk=3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("local_combine", [False, True])
def test_local_combine(pair: Ranks, dtype: str, local_combine: bool) -> None:
    plan = plan_of(Case((12, 15), topk=8, hidden=40, dtype=dtype, local_combine=local_combine))
    other = plan.routing.combine(plan.results, local_combine=not local_combine)
    assert not np.array_equal(plan.combined[0], other[0])  # the results must differ with and without `local_combine`
    pair.run(lambda comm: check(comm, plan))


@pytest.mark.parametrize(
    "case",
    [
        Case((700, 1500, 0), hidden=128, topk=3),
        Case((2, 1, 1), hidden=800_001, dtype="float16", topk=1),
        Case((1, 2, 2), hidden=400_000, topk=1, experts_per_rank=1),
        Case((40, 40, 40), hidden=16, experts_per_rank=64, topk=16),
        Case((1100, 1, 600), hidden=3, topk=16, num_sm=1),
        Case((3, 5, 2), hidden=9001, dtype="bfloat16", topk=8),
    ],
    ids=["many tokens", "long rows", "one expert a rank", "many experts", "one block", "rows in pieces"],
)
@pytest.mark.parametrize(
    ("local_world_size", "local_combine"),
    [(3, False), pytest.param(3, True, marks=pytest.mark.full), (1, False)],  # test_local_combine
)
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
    monkeypatch.setattr(geometry, "ANNOUNCED_SLOTS", 240 if case.topk == 3 else 1024)
    plan = plan_of(replace(case, routing=routing))

    def body(comm: Communicator) -> None:
        with plan.case.layer(comm) as layer:
            assert bool(layer.ctx.workspace.experts.choice_packets) is announced
            check_layer(comm, plan, layer)
            check_layer(comm, plan, layer)

    run_ranks(2, body)


# -- sequences of calls ---


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
    """Returns plans with different values, ids and numbers of tokens, of which none exceeds the maximum of `first`."""
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
    """A program that overlaps two halves of a batch sends a dispatch before it receives the previous combine."""
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
    """A backward pass uses the descriptors of all forward calls, in reverse order."""
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

    world.run(body)


# -- the caller's arrays and streams ---


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
    """The result's error is at most two roundings per added term and one rounding to the dtype."""
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
        if not kernel.name.startswith("expert_weigh"):  # no peer waits for expert_weigh's blocks
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


@pytest.mark.slow
@pytest.mark.parametrize("local_world_size", [pytest.param(2, marks=pytest.mark.full), 1])
def test_finalized_layers_give_back_what_they_took(local_world_size: int) -> None:
    """Finalized layers must give memory ids back, because 254 layers between nodes use all ids."""
    plan = plan_of(Case((4, 6), local_world_size=local_world_size))

    def body(comm: Communicator) -> None:
        for _ in range(260):
            plan.case.layer(comm).finalize()
        check(comm, plan)

    run_ranks(2, body, local_world_size=local_world_size)


def test_a_forgotten_layer_keeps_what_its_peers_reach() -> None:
    """A rank may finish a call before its peers, but must not free memory to which peers still write."""
    plan = plan_of(Case((4, 6)))

    def body(comm: Communicator) -> None:
        workspace = weakref.ref(plan.case.layer(comm).ctx.workspace)
        collect_garbage()
        assert workspace() is not None
        comm.close()
        collect_garbage()
        assert workspace() is None

    run_ranks(2, body)


# -- groups, configuration and buffers ---


@pytest.mark.slow
@pytest.mark.host_only(reason="with arrays of the host")
@pytest.mark.parametrize("local_world_size", [pytest.param(4, marks=pytest.mark.full), 2])
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


# -- layers with `max_recv_tokens` ---


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


@pytest.mark.parametrize(
    ("local_world_size", "local_combine", "alignment"),
    [(3, False, None), (3, True, None), (1, False, None), (3, False, 4), (1, False, 4)],
)
def test_rows_past_a_fixed_maximum_count_as_zero(
    local_world_size: int, local_combine: bool, alignment: int | None
) -> None:
    case = Case((14, 3, 9), topk=4, hidden=12, local_world_size=local_world_size, local_combine=local_combine)
    case = replace(case, alignment=alignment)
    plan = plan_of(case)
    rows = plan.routing.rows
    most = min(rows) + 1
    assert most < max(rows)  # at least one rank receives too many rows

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
                here = np.flatnonzero(plan.routing.filled(rank)[:filled])
                same(on_host(output)[here], plan.rows[rank][here], "output")
                same(on_host(weights)[here], plan.row_weights[rank][here], "weights")
                with pytest.raises(CapacityError) as caught:
                    layer.check()
                assert caught.value.needed == max(rows)
                layer.check()  # the error is raised only once
                results = first(plan.results[rank])
                same_numbers(layer.combine(results, desc), combined[rank], "combine")
                got = layer.combine(results, desc, weights=first(plan.scales[rank]))
                same_numbers(got, scaled[rank], "weighted combine")
            if comm.runtime.name == "host":
                with pytest.raises(CapacityError):  # a call without a stream waits, so the call itself raises the error
                    dispatch_of(layer, plan, comm)
        check(comm, plan)  # `check` makes a layer without a maximum on the same communicator

    run_ranks(3, body, local_world_size=local_world_size)
