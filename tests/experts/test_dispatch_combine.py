"""Compares MoE dispatch and combine with a numpy reference, and checks that they refuse wrong arguments."""

from __future__ import annotations

import functools
import importlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from proxyccl import ArgumentError, Communicator, DispatchCombine, MismatchError, WaitTimeoutError
from proxyccl.device.arrays.array import as_view
from support import running
from support.cases.reference import computed_once, numpy_dtype, poison, unit_roundoff
from support.device_arrays import barrier, on_device, on_host
from support.devices import most_ranks, runtime_with_blocks
from support.paths import EXAMPLES
from support.ranks import Ranks
from support.running import TIMEOUT, impatient, run_mpi

run_ranks = functools.partial(running.run_ranks, make_runtime=runtime_with_blocks)
Values = NDArray[Any]
DTYPES = ("float32", "float64", "float16", "bfloat16")
ROUTINGS = ("uniform", "one expert", "one rank", "mostly dropped", "all dropped")


@dataclass(frozen=True)
class Case:
    """A layer's configuration, and a seed from which all ranks derive the same values.

    Attributes:
        tokens: number of tokens of each rank.
        routing: how the experts are chosen; a token may choose the same expert twice.
    """

    tokens: tuple[int, ...]
    experts_per_rank: int = 2
    topk: int = 2
    hidden: int = 8
    dtype: str = "float32"
    routing: str = "uniform"
    seed: int = 0

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    @property
    def experts(self) -> int:
        return self.ranks * self.experts_per_rank

    def layer(self, comm: Communicator, algorithm: str | None = None) -> DispatchCombine:
        return DispatchCombine(
            comm,
            hidden=self.hidden,
            max_tokens=max(1, *self.tokens),
            experts_per_rank=self.experts_per_rank,
            topk=self.topk,
            dtype=self.dtype,
            algorithm=algorithm,
        )

    def values(self, rank: int, rows: int, what: int) -> Values:
        return _values(self, rank, rows, what).copy()

    def inputs(self, rank: int) -> Values:
        return self.values(rank, self.tokens[rank], 0)

    def expert_ids(self, rank: int) -> NDArray[np.int32]:
        return _expert_ids(self, rank).copy()

    def weights(self, rank: int) -> NDArray[np.float32]:
        rng = np.random.default_rng((self.seed, rank, 2))
        return rng.normal(size=(self.tokens[rank], self.topk)).astype(np.float32)

    # -- the numpy reference ---

    def arrivals(self, rank: int) -> list[tuple[int, int, int]]:
        """Returns (source rank, token, slot) of each row that the rank receives, in the order of rows."""
        return _arrivals(self, rank)

    def counts(self, rank: int) -> list[int]:
        first = rank * self.experts_per_rank
        return [
            sum(int((_expert_ids(self, source) == expert).sum()) for source in range(self.ranks))
            for expert in range(first, first + self.experts_per_rank)
        ]

    def dispatched(self, rank: int, inputs: Callable[[int], Values]) -> Values:
        arrays = [inputs(source) for source in range(self.ranks)]
        rows = [arrays[source][token] for source, token, _ in self.arrivals(rank)]
        return np.array(rows, numpy_dtype(self.dtype)).reshape(-1, self.hidden)

    def results(self, rank: int) -> Values:
        """Returns random values as the results of a rank's experts, which suffice because combine is linear."""
        return self.values(rank, len(self.arrivals(rank)), 3)

    def slots(self, rank: int) -> Values:
        out = np.zeros((self.tokens[rank], self.topk, self.hidden), numpy_dtype(self.dtype))
        for peer in range(self.ranks):
            for (source, token, k), row in zip(self.arrivals(peer), self.results(peer), strict=True):
                if source == rank:
                    out[token, k] = row
        return out


# These functions compute values once for all ranks, which are threads. Each rank gets a copy.


@computed_once
def _values(case: Case, rank: int, rows: int, what: int) -> Values:
    rng = np.random.default_rng((case.seed, rank, what))
    return rng.normal(size=(rows, case.hidden)).astype(numpy_dtype(case.dtype))


@computed_once
def _expert_ids(case: Case, rank: int) -> NDArray[np.int32]:
    rng = np.random.default_rng((case.seed, rank, 1))
    shape = (case.tokens[rank], case.topk)
    dropped = np.full(shape, case.experts)
    chosen = {
        "uniform": rng.integers(0, case.experts + 1, shape),
        "one expert": np.full(shape, case.experts // 2),
        "one rank": rng.integers(0, case.experts_per_rank, shape),
        "mostly dropped": np.where(rng.random(shape) < 0.9, dropped, rng.integers(0, case.experts, shape)),
        "all dropped": dropped,
    }[case.routing]
    return chosen.astype(np.int32)


@computed_once
def _arrivals(case: Case, rank: int) -> list[tuple[int, int, int]]:
    ids = [_expert_ids(case, source) for source in range(case.ranks)]
    first = rank * case.experts_per_rank
    return [
        (source, int(token), int(k))
        for expert in range(first, first + case.experts_per_rank)
        for source in range(case.ranks)
        for token, k in np.argwhere(ids[source] == expert)
    ]


def assert_combined(case: Case, got: Values, slots: Values, weights: Values, *, parts_rounded: bool) -> None:
    """Asserts that `got` is the weighted sum of each token's slots, up to errors of accumulation (two roundings per
    term) and of rounding to the dtype. With `parts_rounded`, each node's partial sum is also rounded.
    """
    terms = slots.astype(np.float64) * weights.astype(np.float64)[:, :, None]
    accumulator = np.dtype(np.float64 if case.dtype == "float64" else np.float32)
    exact, size = terms.sum(axis=1), np.abs(terms).sum(axis=1)
    slack = 2 * case.topk * unit_roundoff(accumulator) * size
    tiny = float(np.finfo(np.float16).smallest_subnormal)
    roundoff = unit_roundoff(numpy_dtype(case.dtype))
    bound = slack + roundoff * (np.abs(exact) + slack) + tiny
    if parts_rounded:
        bound += 2 * roundoff * (size + slack) + case.topk * tiny
    assert np.all(np.abs(got.astype(np.float64) - exact) <= bound)


def prepare(comm: Communicator, case: Case, moe: DispatchCombine) -> NDArray[np.int64]:
    """Prepares the layer with the case's arguments for this rank."""
    arrays = (case.inputs(comm.rank), case.expert_ids(comm.rank), case.weights(comm.rank))
    return moe.prepare(*(on_device(comm, values) for values in arrays))


def check(comm: Communicator, case: Case, algorithm: str | None = None) -> None:
    """Calls every operation of the layer once and checks the results."""
    rank = comm.rank
    weights = case.weights(rank)
    moe = case.layer(comm, algorithm)
    counts = prepare(comm, case, moe)
    assert counts.tolist() == case.counts(rank)
    assert moe.rows_sent.sum() == (case.expert_ids(rank) < case.experts).sum()

    rows, counts = moe.dispatch()
    assert counts.tolist() == case.counts(rank)
    rows = on_host(rows)
    assert rows.dtype == numpy_dtype(case.dtype)
    assert np.array_equal(rows, case.dispatched(rank, case.inputs))
    # This dispatch sends an array that was not prepared, and receives into the caller's memory, which has spare rows.
    poisoned = poison((len(rows) + 3) * case.hidden, numpy_dtype(case.dtype)).reshape(-1, case.hidden)
    untouched = poisoned[len(rows) :].tobytes()
    out = on_device(comm, poisoned)
    other = moe.dispatch(on_device(comm, case.values(rank, case.tokens[rank], 4)), out=out)[0]
    assert other is out
    spare = on_host(out)
    assert np.array_equal(spare[: len(rows)], case.dispatched(rank, lambda s: case.values(s, case.tokens[s], 4)))
    weighted = on_host(moe.dispatch(weighted=True, out=out)[0])
    assert weighted[: len(rows)].tobytes() == on_host(moe.dispatch(weighted=True)[0]).tobytes()
    assert weighted[len(rows) :].tobytes() == untouched

    expected, results = case.slots(rank), on_device(comm, case.results(rank))
    parts_rounded = algorithm == "proxy" or comm.local_world_size < comm.world_size
    combined, plain = on_host(moe.combine(results)), on_host(moe.combine(results, weighted=False))
    assert_combined(case, combined, expected, weights, parts_rounded=parts_rounded)
    assert_combined(case, plain, expected, np.ones_like(weights), parts_rounded=parts_rounded)
    # `collect` brings one number per row back to the row's slot.
    numbers = on_device(comm, case.results(rank)[:, 0].copy())
    assert np.array_equal(on_host(moe.collect(numbers)), expected[:, :, 0])


# -- numbers of ranks and nodes ---

WORLDS = [(1, {}), (2, {}), (3, {}), (4, {}), (5, {}), (8, {})]
WORLDS += [(2, {"local_world_size": 1}), (5, {"local_world_size": 1}), (8, {"local_world_size": 4})]
WORLDS += [(4, {"local_world_size": 2, "fifos": 2, "proxy_threads": 2, "fifo_size": 4})]
# These entries run only with --full, because other entries also have one node of several ranks, or two such nodes.
REPRESENTED = [(4, {}), (8, {}), (8, {"local_world_size": 4})]


def world_name(world: tuple[int, dict[str, int]]) -> str:
    size, options = world
    return "-".join([str(size), *(f"{name}{value}" for name, value in options.items())])


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(world, marks=pytest.mark.full if world in REPRESENTED else [])
        for world in WORLDS
        if world[0] <= most_ranks()
    ],
    ids=world_name,
)
def world(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    size, options = request.param
    with Ranks(size, make_runtime=runtime_with_blocks, **options) as ranks:
        yield ranks


@st.composite
def cases(draw: st.DrawFn, ranks: int) -> Case:
    return Case(
        tokens=tuple(draw(st.lists(st.integers(0, 24), min_size=ranks, max_size=ranks))),
        experts_per_rank=draw(st.integers(1, 5)),
        topk=draw(st.integers(1, 6)),
        hidden=draw(st.sampled_from([1, 2, 3, 7, 16, 33, 128])),
        dtype=draw(st.sampled_from(DTYPES)),
        routing=draw(st.sampled_from(ROUTINGS)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def test_random_configurations(world: Ranks, pytestconfig: pytest.Config) -> None:
    @settings(max_examples=8 if pytestconfig.getoption("--full") else 4, deadline=None)
    @given(case=cases(world.world_size), algorithm=st.sampled_from([None, "proxy"]))
    def check_any(case: Case, algorithm: str | None) -> None:
        world.run(lambda comm: check(comm, case, algorithm))

    check_any()


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings(world: Ranks, routing: str) -> None:
    tokens = tuple(17 - 2 * rank for rank in range(world.world_size))
    case = Case(tokens, experts_per_rank=3, topk=4, hidden=24, routing=routing)
    world.run(lambda comm: check(comm, case))


def test_no_tokens_anywhere(world: Ranks) -> None:
    world.run(lambda comm: check(comm, Case((0,) * world.world_size)))


# -- more data than one message or one round of the exchange, which moves 4 MiB to each rank ---

SIZES = {
    "many rounds": Case((700, 1500, 0), hidden=512, topk=3),
    "one expert gets all": Case((1300, 0, 1), hidden=600, topk=2, routing="one expert", dtype="float64"),
    "row beyond a slot": Case((2, 1, 1), hidden=800_001, dtype="float16", topk=1),
    "row of many slots": Case((1, 2, 2), hidden=400_000, dtype="float32", topk=1, experts_per_rank=1),
    "many experts": Case((64, 64, 64), hidden=16, experts_per_rank=64, topk=16),
}


@pytest.mark.hip
@pytest.mark.parametrize(
    ("case", "algorithm"),
    [
        # Without --full, the cases alternate between the two algorithms; the first case runs with both.
        pytest.param(
            case,
            algorithm,
            id=f"{name}-{algorithm}",
            marks=[
                *([pytest.mark.full] if i and j else []),
                pytest.mark.hip_full if i < len(SIZES) - 1 else pytest.mark.hip,
                *([] if i else [pytest.mark.daemon]),
            ],
        )
        for i, (name, case) in enumerate(SIZES.items())
        for j, algorithm in enumerate((None, "proxy") if i % 2 == 0 else ("proxy", None))
    ],
)
def test_sizes(case: Case, algorithm: str | None) -> None:
    run_ranks(3, lambda comm: check(comm, case, algorithm))


# -- gradients ---


@pytest.mark.parametrize("local_world_size", [None, 1])
def test_dispatch_and_combine_are_adjoint(local_world_size: int | None) -> None:
    case = Case((9, 0, 14), experts_per_rank=2, topk=3, hidden=20, dtype="float64")

    def body(comm: Communicator) -> tuple[float, ...]:
        moe = case.layer(comm)
        x, weights, r = case.inputs(comm.rank), case.weights(comm.rank), case.results(comm.rank)
        prepare(comm, case, moe)
        x_there, r_there = on_device(comm, x), on_device(comm, r)
        weighted = on_host(moe.combine(r_there))
        dots = (on_host(moe.dispatch(x_there)[0]) * r).sum(-1)
        sums = [
            (on_host(moe.dispatch(x_there)[0]) * r).sum(),
            (x * on_host(moe.combine(r_there, weighted=False))).sum(),
            (on_host(moe.dispatch(x_there, weighted=True)[0]) * r).sum(),
            (x * weighted).sum(),
            (on_host(moe.collect(on_device(comm, dots))) * weights).sum(),
        ]
        return tuple(float(value) for value in sums)

    plain, plain_back, weighted, weighted_back, by_weights = np.sum(
        run_ranks(3, body, local_world_size=local_world_size), axis=0
    )
    assert plain == pytest.approx(plain_back, rel=1e-12)
    assert weighted == pytest.approx(weighted_back, rel=1e-12)
    assert by_weights == pytest.approx(weighted_back, rel=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weighted_dispatch_rounds_once(dtype: str) -> None:
    case = Case((6, 11), hidden=40, dtype=dtype)

    def body(comm: Communicator) -> None:
        moe = case.layer(comm)
        prepare(comm, case, moe)
        rows = on_host(moe.dispatch(weighted=True)[0])
        wide = np.float64 if dtype == "float64" else np.float32
        for row, (source, token, k) in zip(rows, case.arrivals(comm.rank), strict=True):
            expected = case.inputs(source)[token].astype(wide) * wide(case.weights(source)[token, k])
            assert np.array_equal(row, expected.astype(row.dtype))

    run_ranks(2, body)


# -- the caller's arrays and streams ---


def test_device_arrays_and_streams() -> None:
    case = Case((12, 5, 9), experts_per_rank=2, topk=2, hidden=16, dtype="bfloat16")

    def body(comm: Communicator) -> None:
        rank, stream = comm.rank, comm.runtime.create_stream()
        tokens = comm.empty((case.tokens[rank], case.hidden), "bfloat16").upload(case.inputs(rank))
        ids = comm.empty((case.tokens[rank], case.topk), "int32").upload(case.expert_ids(rank))
        weights = comm.empty((case.tokens[rank], case.topk), "float32").upload(case.weights(rank))
        results = comm.empty((len(case.arrivals(rank)), case.hidden), "bfloat16").upload(case.results(rank))
        moe = case.layer(comm)
        assert moe.prepare(tokens, ids, weights, stream=stream).tolist() == case.counts(rank)
        rows, _ = moe.dispatch(stream=stream)
        output = moe.combine(results, stream=stream)
        again = moe.combine(results, weighted=False, stream=stream)
        comm.synchronize(stream)
        assert np.array_equal(rows.numpy(), case.dispatched(rank, case.inputs))
        assert_combined(case, output.numpy(), case.slots(rank), case.weights(rank), parts_rounded=False)
        assert_combined(case, again.numpy(), case.slots(rank), np.ones_like(case.weights(rank)), parts_rounded=False)

    run_ranks(3, body)


def test_a_layer_may_be_dropped_while_its_work_is_queued() -> None:
    """Each layer is dropped without waiting for the calls that are queued on its stream."""
    case = Case((0, 40, 16), hidden=256, topk=4)

    def body(comm: Communicator) -> None:
        stream = comm.runtime.create_stream()
        arrays = (case.inputs(comm.rank), case.expert_ids(comm.rank), case.weights(comm.rank))
        tokens, ids, weights = (on_device(comm, values) for values in arrays)
        outputs = []
        for _ in range(10):
            moe = case.layer(comm)
            moe.prepare(tokens, ids, weights, stream=stream)
            rows, _ = moe.dispatch(stream=stream)
            outputs.append(moe.combine(rows, stream=stream))
            del moe, rows
        comm.synchronize(stream)
        kept = np.where(arrays[1] < case.experts, arrays[2], 0).sum(axis=1, keepdims=True)
        for output in outputs:
            assert np.allclose(on_host(output), arrays[0] * kept, rtol=1e-4, atol=1e-4)

    run_ranks(3, body)


def test_a_layer_is_prepared_among_other_collectives() -> None:
    case = Case((30, 7, 0, 16), hidden=32)

    def body(comm: Communicator) -> None:
        moe = case.layer(comm)
        for step in range(20):
            tokens = case.tokens[comm.rank] * (step % 3) // 2
            inputs = case.inputs(comm.rank)[:tokens] + step
            ids, weights = case.expert_ids(comm.rank)[:tokens], case.weights(comm.rank)[:tokens]
            moe.prepare(*(on_device(comm, values) for values in (inputs, ids, weights)))
            rows, counts = moe.dispatch()
            arrived = on_host(comm.all_reduce(on_device(comm, np.array([len(rows)], np.int64))))
            assert arrived[0] == on_host(comm.all_reduce(on_device(comm, moe.rows_sent))).sum()
            assert counts.sum() == len(rows)
            kept = np.where(ids < case.experts, weights, 0)
            assert np.allclose(
                on_host(moe.combine(rows)), inputs * kept.sum(axis=1, keepdims=True), rtol=1e-4, atol=1e-4
            )

    run_ranks(4, body)


def test_weights_may_be_left_out() -> None:
    case = Case((4, 6), experts_per_rank=1)

    def body(comm: Communicator) -> None:
        moe = case.layer(comm)
        moe.prepare(on_device(comm, case.inputs(comm.rank)), on_device(comm, case.expert_ids(comm.rank)))
        expected = case.slots(comm.rank)
        combined = on_host(moe.combine(on_device(comm, case.results(comm.rank))))
        assert_combined(case, combined, expected, np.ones(expected.shape[:2]), parts_rounded=False)

    run_ranks(2, body)


def moved_by_proxies(case: Case, algorithm: str | None) -> list[tuple[int, int]]:
    """Runs `check` on two ranks. Returns each rank's number of triggers and the bytes that its proxy moved."""

    def body(comm: Communicator) -> tuple[int, int]:
        check(comm, case, algorithm)
        barrier(comm)  # the proxy counts triggers before it sends data, so it has counted all triggers
        if comm.group.links.proxy_if_started is None:
            return 0, 0
        counters = [comm.proxy.counters(channel) for channel in range(64)]
        return sum(c.triggers for c in counters), sum(c.bytes for c in counters)

    return run_ranks(2, body)


def test_triggers_move_the_data_only_where_the_proxy_is_asked_to() -> None:
    case = Case((8, 8), hidden=64)
    assert moved_by_proxies(case, None) == [(0, 0), (0, 0)]


def test_a_token_crosses_once_for_all_its_experts() -> None:
    case = Case((8, 8), hidden=3584, topk=4)  # one row is long enough to be a message
    wider = replace(case, hidden=7168)
    crossing = [
        int((case.expert_ids(rank) // case.experts_per_rank == 1 - rank).any(axis=1).sum()) for rank in range(2)
    ]
    pairs = zip(moved_by_proxies(case, "proxy"), moved_by_proxies(wider, "proxy"), strict=True)
    for rank, ((triggers, moved), (more_triggers, more_moved)) in enumerate(pairs):
        assert more_triggers == triggers
        # Longer rows lengthen only the rows of four dispatches and the results of two combines.
        assert more_moved - moved == (4 * crossing[rank] + 2 * crossing[1 - rank]) * 3584 * 4, rank


# -- refusals ---


def refused(argument: str, call: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.argument == argument, caught.value


def finish(comm: Communicator, call: Callable[[], object]) -> None:
    """Makes the call and synchronizes, because on a GPU some errors appear only then."""
    call()
    comm.synchronize()


def test_wrong_constructor_arguments_are_refused_by_name() -> None:
    good: dict[str, Any] = {"hidden": 8, "max_tokens": 4, "experts_per_rank": 2, "topk": 2}

    def body(comm: Communicator) -> None:
        for argument, value in [
            ("hidden", 0),
            ("hidden", 8.0),
            ("max_tokens", -1),
            ("experts_per_rank", 0),
            ("topk", 0),
            ("dtype", "int32"),
            ("dtype", "float33"),
            ("algorithm", "ring"),
            ("max_tokens", 2**31),
        ]:
            refused(argument, lambda a=argument, v=value: DispatchCombine(comm, **{**good, a: v}))

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("hidden", 9),
        ("max_tokens", 5),
        ("experts_per_rank", 3),
        ("topk", 3),
        ("dtype", "float64"),
        ("algorithm", "proxy"),
    ],
)
def test_constructor_arguments_that_differ_are_refused_on_all(argument: str, value: Any) -> None:
    def body(comm: Communicator) -> None:
        options: dict[str, Any] = {"hidden": 8, "max_tokens": 4, "experts_per_rank": 2, "topk": 2}
        changed = {**options, argument: value} if comm.rank == 1 else options
        refused(argument, lambda: DispatchCombine(comm, **changed))
        check(comm, Case((3, 2, 1)))  # the communicator stays usable

    run_ranks(3, body)


@pytest.mark.parametrize("bad", [-1, 5, 2**31 - 1, -(2**31)])
def test_a_bad_expert_id_is_refused_on_all_ranks_first(bad: int) -> None:
    def body(comm: Communicator) -> None:
        moe = DispatchCombine(comm, hidden=4, max_tokens=8, experts_per_rank=2, topk=3)
        good = np.full((6, 3), 4, np.int32)
        wrong = good.copy()
        if comm.rank == 1:
            wrong[2, 1] = wrong[4, 0] = bad
        tokens = on_device(comm, np.ones((6, 4), np.float32))
        with pytest.raises(ArgumentError, match=r"expert_ids: \[2, 1\] on rank 1"):
            moe.prepare(tokens, on_device(comm, wrong))
        refused("prepare", moe.dispatch)
        moe.prepare(tokens, on_device(comm, np.full_like(good, 3)))
        assert np.array_equal(on_host(moe.combine(moe.dispatch()[0])), np.full((6, 4), 3))

    run_ranks(2, body)


def test_wrong_arrays_are_refused_by_name() -> None:
    def body(comm: Communicator) -> None:
        moe = DispatchCombine(comm, hidden=4, max_tokens=8, experts_per_rank=2, topk=2)

        def ones(*shape: int, dtype: Any = np.float32) -> Any:
            return on_device(comm, np.ones(shape, dtype))

        def zeros(*shape: int, dtype: Any = np.int32) -> Any:
            return on_device(comm, np.zeros(shape, dtype))

        tokens, weights, ids = ones(5, 4), ones(5, 2), zeros(5, 2)
        refused("prepare", moe.dispatch)
        refused("prepare", lambda: moe.combine(tokens))
        refused("prepare", lambda: moe.rows_sent)
        refused("tokens", lambda: moe.prepare(ones(9, 4), zeros(9, 2)))
        refused("tokens", lambda: moe.prepare(ones(5, 4, dtype=np.float64), ids, weights))
        refused("tokens", lambda: moe.prepare(ones(5, 3), ids, weights))
        refused("tokens", lambda: moe.prepare(np.ones((5, 4), np.float32)[::2], ids, weights))
        refused("tokens", lambda: moe.prepare([1.0], ids, weights))
        refused("expert_ids", lambda: moe.prepare(tokens, zeros(5, 2, dtype=np.int64), weights))
        refused("expert_ids", lambda: moe.prepare(tokens, ids[:4], weights))
        refused("expert_ids", lambda: moe.prepare(tokens, zeros(5, 1), weights))
        refused("weights", lambda: moe.prepare(tokens, ids, ones(5, 2, dtype=np.float64)))
        refused("weights", lambda: moe.prepare(tokens, ids, weights[:4]))
        refused("stream", lambda: moe.prepare(tokens, ids, weights, stream=object()))

        moe.prepare(tokens, ids, weights)
        refused("x", lambda: moe.dispatch(tokens[:4]))
        refused("out", lambda: moe.dispatch(out=ones(9, 4)))  # ten rows come
        refused("out", lambda: moe.dispatch(out=ones(10, 4, dtype=np.float64)))
        refused("out", lambda: moe.dispatch(tokens, out=tokens))
        refused("out", lambda: moe.dispatch(out=replace(as_view(ones(10, 4), "out"), writable=False)))
        rows = on_device(comm, on_host(moe.dispatch()[0]))
        refused("rows", lambda: moe.combine(rows[:9]))
        refused("rows", lambda: moe.combine(ones(10, 4, dtype=np.float16)))
        refused("out", lambda: moe.combine(rows, out=rows[:5]))
        refused("out", lambda: moe.combine(rows, out=ones(4, 4)))
        refused("values", lambda: moe.collect(ones(9)))
        refused("values", lambda: moe.collect(ones(10, dtype=np.float64)))
        assert np.array_equal(on_host(moe.combine(rows)), np.full((5, 4), 2))

    run_ranks(1, body)


def test_another_call_on_another_rank_is_a_mismatch() -> None:
    case = Case((4, 4))

    def body(comm: Communicator) -> None:
        moe = case.layer(comm)
        moe.prepare(on_device(comm, case.inputs(comm.rank)), on_device(comm, case.expert_ids(comm.rank)))
        results = on_device(comm, case.results(comm.rank))
        with pytest.raises(MismatchError) as caught:
            finish(comm, moe.dispatch if comm.rank == 0 else lambda: moe.combine(results))
        assert caught.value.argument == "collective"

    run_ranks(2, body)


def test_a_missing_rank_is_waited_for_within_the_time_out() -> None:
    given_up = threading.Event()

    def body(comm: Communicator) -> None:
        moe = Case((4, 4)).layer(comm)
        tokens, ids = on_device(comm, np.ones((4, 8), np.float32)), on_device(comm, np.full((4, 2), 3, np.int32))
        impatient(comm, 1)
        if comm.rank == 0:
            with pytest.raises(WaitTimeoutError) as caught:
                moe.prepare(tokens, ids)
            assert (caught.value.rank, caught.value.peer) == (0, 1)
            given_up.set()
        else:
            assert given_up.wait(TIMEOUT)
            with pytest.raises(WaitTimeoutError):
                moe.prepare(tokens, ids)

    run_ranks(2, body)


# -- the example ---


def assert_equals_one_process(result: dict[str, Any]) -> None:
    assert result["channel"] == "SmChannel and ProxyChannel"
    assert result["difference"] <= 1e-5
    assert result["accuracy"] == result["reference_accuracy"] > 0.7
    assert 0 < result["rows_between_ranks"] < result["rows"]
    assert result["proxy"]["triggers"] > 0


@pytest.mark.slow
def test_mixture_of_experts_equals_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    example = importlib.import_module("moe_digits")
    assert_equals_one_process(
        asdict(run_ranks(4, lambda comm: example.run(comm, epochs=2, batch=256), local_world_size=2)[0])
    )


@pytest.mark.full
def test_mixture_of_experts_as_a_program_equals_one_process() -> None:
    env = {"PROXYCCL_LOCAL_WORLD_SIZE": "2"}
    done = run_mpi(4, EXAMPLES / "moe_digits.py", "--epochs", "2", "--json", env=env)
    assert done.returncode == 0, done.stderr
    assert_equals_one_process(json.loads(done.stdout.splitlines()[-1].removeprefix("RESULT ")))
