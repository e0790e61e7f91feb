"""Checks the collectives' results for every algorithm, type and operation, at odd sizes and offsets."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from proxyccl import Communicator
from proxyccl.channels.collectives.selection import PACKET_ALGORITHMS
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.host import HostRuntime
from proxyccl.device.runtimes import open_runtime
from support.cases.reference import (
    ALGORITHMS,
    BITWISE_OPS,
    CHOICES,
    DTYPES,
    MOVES,
    OPS,
    SOME_DTYPES,
    Call,
    operations_of,
    ops_of,
)
from support.device_arrays import barrier, on_device, on_host
from support.devices import RUNTIME, processes, runtime_with_blocks, world_sizes
from support.paths import PROGRAMS
from support.ranks import Ranks
from support.running import run_mpi

WORLD_SIZES = (1, 2, 3, 4, 5, 8)
REPRESENTED = (5, 8)  # these numbers of ranks run only with --full, because 3 and 4 ranks run the same code paths
ALL_TYPES = max(world_sizes(1, 2, 3))  # only tests with this number of ranks use all types


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=pytest.mark.full if n in REPRESENTED else []) for n in world_sizes(*WORLD_SIZES)],
    ids=lambda n: f"{n}-ranks",
)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(request.param, make_runtime=runtime_with_blocks) as group:
        yield group


def types_of(algorithm: str | None, config: pytest.Config) -> tuple[str, ...]:
    """Returns the types that a test reduces with an algorithm: all types with --full, else every third type, because
    all algorithms combine two elements of a type with the same function.
    """
    return DTYPES if config.getoption("--full") else DTYPES[CHOICES.index(algorithm) % 3 :: 3]


def run_calls(ranks: Ranks, calls: list[Call]) -> None:
    """Makes the calls one after another. Each rank checks its results, and the bits of all-reduces must be equal on all
    ranks.
    """

    def body(comm: Communicator) -> list[bytes]:
        return [call.start(comm).finish() for call in calls]

    results = ranks.run(body)
    for number, call in enumerate(calls):
        if call.collective == "all_reduce":
            outputs = {result[number] for result in results}
            assert len(outputs) == 1, f"{call}: ranks got different bits"


@pytest.mark.parametrize("algorithm", CHOICES)
def test_an_average_of_16_bit_floats_fits_where_their_sum_does_not(ranks: Ranks, algorithm: str | None) -> None:
    def body(comm: Communicator) -> None:
        if algorithm not in (None, *comm.collectives.algorithms()):
            return
        for dtype in ("float16", "bfloat16"):
            largest = np.full(1000, float(ml_dtypes.finfo(dtype).max), as_dtype(dtype).numpy())
            result = comm.all_reduce(on_device(comm, largest), "avg", algorithm=algorithm)
            barrier(comm)
            np.testing.assert_array_equal(on_host(result), largest)

    ranks.run(body)


@pytest.mark.parametrize("algorithm", CHOICES)
def test_all_reduce_computes_every_operation(ranks: Ranks, algorithm: str | None, pytestconfig: pytest.Config) -> None:
    """Calls are in place and out of place, at odd offsets, with counts that fill no whole packet, warp or share."""
    full = pytestconfig.getoption("--full")
    for dtype in types_of(algorithm, pytestconfig) if ranks.world_size == ALL_TYPES else SOME_DTYPES:
        ops = ops_of(dtype) if full else operations_of(dtype, algorithm)
        odd = [(ops[0], count) for count in (0, 1, 3)] if dtype in SOME_DTYPES else []
        calls = [*odd, *itertools.product(ops, (17, 1000))]
        run_calls(
            ranks,
            [
                Call("all_reduce", dtype, op, algorithm, count, i % 4, in_place=i % 2 == 0, own_memory=i % 3 == 0)
                for i, (op, count) in enumerate(calls)
            ],
        )


@pytest.mark.parametrize(
    ("algorithm", "dtype"),
    [
        # Without --full, bfloat16 runs with only two algorithms (one uses packets, one does not), because the call's
        # steps depend on its bytes, not on its type.
        pytest.param(algorithm, dtype, marks=pytest.mark.full if dtype == "bfloat16" and i not in (1, 3) else [])
        for i, algorithm in enumerate(ALGORITHMS)
        for dtype in ("float32", "bfloat16")
    ],
)
def test_all_reduce_of_more_than_the_scratch_memory_holds(ranks: Ranks, algorithm: str, dtype: str) -> None:
    """The call needs several steps (epochs of packets, or rounds of the exchange), and the last step is short."""
    memory = open_runtime(RUNTIME).launch_defaults.data_bytes
    long = min(5 * memory, 8_800_000) // 4 + 1 if dtype == "float32" else min(2 * memory, 4_200_000) // 2 + 3
    several = 100_007 if algorithm == "two_shot_packets" else 40_007
    counts = (8 * 1024 + 1, several) if algorithm in PACKET_ALGORITHMS else (long,)
    run_calls(
        ranks,
        [
            Call("all_reduce", dtype, "sum", algorithm, count, offset=i + 1, in_place=i == 0)
            for i, count in enumerate(counts)
        ],
    )


@pytest.mark.host_only(reason="sets the size of the buffers")
@pytest.mark.parametrize("of_node", [3, 1], ids=["mapped", "by-proxy"])
def test_rounds_and_pieces_share_buffers(of_node: int) -> None:
    """Ranks that are late still read a call's last round when the other ranks begin the next call, in pieces."""

    def make_runtime(_: int) -> HostRuntime:
        runtime = HostRuntime(blocks=2)
        runtime.launch_defaults = replace(runtime.launch_defaults, data_bytes=4096, result_bytes=2048)
        return runtime

    def body(comm: Communicator) -> None:
        rank, ranks = comm.rank, comm.world_size
        generator = np.random.default_rng(rank)
        whole = np.random.default_rng(7).integers(0, 1 << 20, 6000, np.int32)
        for i in range(60):
            if generator.random() < 0.3:
                time.sleep(0.002 * generator.random())
            if i % 2:
                x = whole + rank
                comm.all_reduce(x, algorithm="two_shot")
                assert np.array_equal(x, ranks * whole + ranks * (ranks - 1) // 2), i
            else:
                gathered = np.empty(ranks * (300 + 500 * (i % 3)), np.int32)
                share = len(gathered) // ranks
                comm.all_gather(whole[:share] + rank, out=gathered, algorithm="kernels")
                assert np.array_equal(gathered, np.concatenate([whole[:share] + r for r in range(ranks)])), i

    with Ranks(3, make_runtime=make_runtime, local_world_size=of_node, transport="copy") as ranks:
        ranks.run(body)


@pytest.mark.parametrize("algorithm", [None, "proxy"])
@pytest.mark.parametrize("op", OPS + BITWISE_OPS)
def test_reduce_scatter_gives_each_rank_its_share(
    ranks: Ranks, op: str, algorithm: str | None, pytestconfig: pytest.Config
) -> None:
    dtypes = types_of(algorithm, pytestconfig) if ranks.world_size == ALL_TYPES else SOME_DTYPES
    full = pytestconfig.getoption("--full")
    run_calls(
        ranks,
        [
            Call("reduce_scatter", dtype, op, algorithm, count, offset=i % 3, in_place=i % 2 == 0)
            for i, (dtype, count) in enumerate(itertools.product(dtypes, (0, 1, 17, 601)))
            if op in (ops_of(dtype) if full else operations_of(dtype, algorithm))
        ],
    )


@pytest.mark.parametrize("algorithm", [None, "proxy"])
@pytest.mark.parametrize("collective", MOVES)
def test_moves_bytes_of_any_type(ranks: Ranks, collective: str, algorithm: str | None) -> None:
    dtypes = (*DTYPES, "complex128") if ranks.world_size == ALL_TYPES else SOME_DTYPES
    run_calls(
        ranks,
        [
            Call(collective, dtype, "sum", algorithm, count, i % 3, i % 2 == 0, root=i % ranks.world_size)
            for i, (dtype, count) in enumerate(itertools.product(dtypes, (0, 1, 17, 603)))
        ],
    )


@pytest.mark.parametrize("algorithm", [None, "proxy"])
@pytest.mark.parametrize("collective", ["reduce_scatter", *MOVES])
def test_moves_more_than_the_scratch_memory_holds(ranks: Ranks, collective: str, algorithm: str | None) -> None:
    count = 1_200_001 if collective == "broadcast" else 1_200_001 // ranks.world_size
    run_calls(
        ranks,
        [
            Call(collective, "float32", "sum", algorithm, count, offset=1, in_place=in_place)
            for in_place in (True, False)
        ],
    )


@pytest.mark.parametrize("algorithm", sorted(PACKET_ALGORITHMS))
def test_short_last_epochs_back_to_back_keep_slots_apart(
    ranks: Ranks, algorithm: str, pytestconfig: pytest.Config
) -> None:
    """Each call has one packet more than fits into an epoch. Most threads have no packet in the call's second epoch and
    begin the next call early.
    """
    capacity = 8192 * (ranks.world_size if algorithm == "two_shot_packets" else 1)
    times = 30 if pytestconfig.getoption("--full") else 12
    run_calls(ranks, [Call("all_reduce", "float32", "sum", algorithm, capacity + 1, seed=i % 3) for i in range(times)])


def calls(world_size: int, config: pytest.Config) -> st.SearchStrategy[Call]:
    def call(collective: str) -> st.SearchStrategy[Call]:
        reduces = collective in ("all_reduce", "reduce_scatter")
        algorithms = CHOICES if collective == "all_reduce" else (None, "proxy")
        instances = [
            (dtype, op, algorithm)
            for algorithm in algorithms
            for dtype in (types_of(algorithm, config) if reduces else DTYPES)
            for op in (operations_of(dtype, algorithm) if reduces else ("sum",))
        ]
        return st.builds(
            lambda instance, *others: Call(collective, *instance, *others),
            st.sampled_from(instances),
            st.sampled_from([0, 1, 2, 3, 7, 17, 64, 257, 1000, 4097, 8193, 20_011]),
            st.integers(0, 5),
            st.booleans(),
            st.booleans(),
            st.integers(0, world_size - 1),
            st.integers(0, 3),
        )

    return st.sampled_from(["all_reduce", "all_reduce", "reduce_scatter", *MOVES]).flatmap(call)


def test_any_sequence_of_calls_gives_the_right_results_twice(ranks: Ranks, pytestconfig: pytest.Config) -> None:
    """Slots are reused from call to call, and only the protocol (exchange.h, packets.h) protects their data."""

    @settings(
        max_examples=12 if pytestconfig.getoption("--full") else 4, deadline=None, derandomize=True, print_blob=True
    )
    @given(st.lists(calls(ranks.world_size, pytestconfig), min_size=1, max_size=25))
    def check(sequence: list[Call]) -> None:
        run_calls(ranks, sequence + sequence)

    check()


def test_barrier_waits_for_every_rank(ranks: Ranks) -> None:
    arrived: list[int] = []

    def body(comm: Communicator) -> None:
        for turn in range(20):
            arrived.append(turn)
            barrier(comm)
            assert arrived.count(turn) == comm.world_size
            barrier(comm)

    ranks.run(body)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_minimum_and_maximum_pass_nan_on(ranks: Ranks, algorithm: str, pytestconfig: pytest.Config) -> None:
    turn = ALGORITHMS.index(algorithm)
    ops = ("min", "max") if pytestconfig.getoption("--full") else (("min", "max")[turn % 2],)

    def body(comm: Communicator) -> None:
        dtype = ("float32", "float64", "float16")[turn % 3]  # test_same_bits.py tests the other float types
        for op in ops:
            values = np.arange(9, dtype=dtype)
            if comm.rank == comm.world_size - 1:
                values[4] = np.nan
            reduced = on_host(comm.all_reduce(on_device(comm, values), op, algorithm=algorithm))
            assert np.array_equal(np.isnan(reduced), np.arange(9) == 4)

    ranks.run(body)


def test_results_have_the_documented_shapes(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        n = comm.world_size
        x = on_device(comm, np.full((2 * n, 3), comm.rank, np.int32))
        assert comm.all_gather(x).shape == (2 * n * n, 3)
        assert comm.reduce_scatter(x).shape == (2, 3)
        assert comm.all_to_all(x).shape == (2 * n, 3)
        assert np.array_equal(on_host(comm.all_to_all(x))[:, 0], np.repeat(np.arange(n), 2))
        assert on_host(comm.all_gather(on_device(comm, np.int64(comm.rank)))).tolist() == list(range(n))
        own = comm.empty((2 * n, 3), "int32").fill(comm.rank)
        assert np.array_equal(comm.reduce_scatter(own).numpy(), np.full((2, 3), n * (n - 1) // 2))

    ranks.run(body)


@pytest.mark.slow
@pytest.mark.parametrize(
    "world_size",
    [
        # The tests above run the ranks as threads; test_by_proxy.py runs processes that use a daemon.
        pytest.param(size, marks=pytest.mark.hip if size == processes(3) else pytest.mark.full)
        for size in world_sizes(1, 2, 3, 5, processes=True)
    ],
)
def test_ranks_as_processes(world_size: int) -> None:
    run_program(world_size)


@pytest.mark.slow
@pytest.mark.parametrize("local_world_size", [pytest.param(1, marks=pytest.mark.full), 2])
def test_ranks_as_processes_on_rehearsed_nodes(local_world_size: int) -> None:
    run_program(2 * (processes(4) // 2), PROXYCCL_LOCAL_WORLD_SIZE=str(local_world_size))


def run_program(world_size: int, **env: str) -> None:
    result = run_mpi(world_size, PROGRAMS / "collectives.py", env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("correct") == world_size, result.stdout + result.stderr
