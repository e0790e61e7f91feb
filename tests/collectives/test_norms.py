"""all_reduce_rms_norm: adds rows and residuals and normalizes the sums, in one launch or several."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from proxyccl import ArgumentError, Communicator, MismatchError
from proxyccl.channels.collectives.selection import SizeTable
from support.cases.reference import numpy_dtype
from support.device_arrays import barrier, on_device, on_host
from support.devices import ON_HOST, runtime_with_blocks, runtime_with_lines, world_sizes
from support.ranks import Ranks
from support.running import run_ranks

EPS = 1e-5
SHAPES = ((1, 64), (3, 100), (5, 7), (2, *[1] * 6, 3, 520), (9, 2048))
ALGORITHMS = (None, "one_shot", "two_shot_packets", "two_shot", "proxy")
FLOAT8 = "float8_e4m3fn"
MAKERS = {"packets": runtime_with_blocks, "lines": runtime_with_lines} if ON_HOST else {"GPU": runtime_with_blocks}


@pytest.fixture(scope="module", params=[(make, n) for make in MAKERS for n in world_sizes(1, 2, 3, 5)], ids=str)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    make, world_size = request.param
    with Ranks(world_size, make_runtime=MAKERS[make]) as group:
        yield group


def values(seed: int, shape: tuple[int, ...], name: str) -> NDArray[Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(numpy_dtype(name))


def inputs(rank: int, shape: tuple[int, ...], name: str) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Returns a rank's rows, and the residual and the weight, which are the same on all ranks."""
    return values(rank, shape, name), values(100, shape, name), values(101, shape[-1:], name)


def summed(ranks: int, shape: tuple[int, ...], name: str) -> NDArray[Any]:
    """Returns round(round(sum of the ranks' rows, in rank order) + residual)."""
    rows = [inputs(rank, shape, name)[0].astype(np.float32) for rank in range(ranks)]
    total = functools.reduce(np.add, rows).astype(numpy_dtype(name))
    return (total.astype(np.float32) + inputs(0, shape, name)[1].astype(np.float32)).astype(total.dtype)


def normed(rows: NDArray[Any], weight: NDArray[Any]) -> NDArray[Any]:
    """Returns the RMSNorm of rows, in float64."""
    wide = rows.astype(np.float64)
    return wide / np.sqrt(np.square(wide).mean(-1, keepdims=True) + EPS) * weight.astype(np.float64)


def require_normed(got: NDArray[Any], rows: NDArray[Any], weight: NDArray[Any]) -> None:
    """Asserts that the rows' errors are at most one rounding to their type and a few roundings to float32."""
    want = normed(rows, weight)
    spacing = 2.0 ** -(8 if got.dtype == numpy_dtype("bfloat16") else 11)
    assert (np.abs(got.astype(np.float64) - want) <= (spacing + 1e-6) * np.abs(want) + 1e-6).all()


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_rows_are_summed_as_by_all_reduce_and_normed(ranks: Ranks, name: str) -> None:
    def body(comm: Communicator) -> None:
        for shape in SHAPES if name == "bfloat16" else SHAPES[:2]:
            x, residual, weight = (on_device(comm, each) for each in inputs(comm.rank, shape, name))
            for algorithm in ALGORITHMS:
                out, sums, scales = comm.all_reduce_rms_norm(x, residual, weight, EPS, algorithm=algorithm)
                barrier(comm)
                assert scales is None
                assert on_host(sums).tobytes() == summed(comm.world_size, shape, name).tobytes(), (shape, algorithm)
                require_normed(on_host(out), on_host(sums), on_host(weight))

    ranks.run(body)


def test_a_row_may_be_longer_than_the_memory_for_its_packets(ranks: Ranks) -> None:
    shape = (3, 70_000)

    def body(comm: Communicator) -> None:
        x, residual, weight = (on_device(comm, each) for each in inputs(comm.rank, shape, "bfloat16"))
        for algorithm in ("one_shot", "two_shot_packets") if comm.world_size > 1 else ():
            out, sums, _ = comm.all_reduce_rms_norm(x, residual, weight, EPS, algorithm=algorithm)
            barrier(comm)
            assert on_host(sums).tobytes() == summed(comm.world_size, shape, "bfloat16").tobytes(), algorithm
            require_normed(on_host(out), on_host(sums), on_host(weight))

    ranks.run(body)


def test_results_may_take_the_place_of_rows_and_residual(ranks: Ranks) -> None:
    shape = (6, 200)

    def body(comm: Communicator) -> None:
        want = summed(comm.world_size, shape, "bfloat16")
        for algorithm in ALGORITHMS:
            for swapped in (False, True):
                x, residual, weight = (on_device(comm, each) for each in inputs(comm.rank, shape, "bfloat16"))
                out, residual_out = (residual, x) if swapped else (x, residual)
                got = comm.all_reduce_rms_norm(
                    x, residual, weight, EPS, out=out, residual_out=residual_out, algorithm=algorithm
                )
                barrier(comm)
                assert got.out is out
                assert got.residual is residual_out
                assert on_host(residual_out).tobytes() == want.tobytes(), (algorithm, swapped)
                require_normed(on_host(out), want, on_host(weight))

    ranks.run(body)


@pytest.mark.parametrize("algorithm", ["two_shot", "ring", "recursive_doubling"])
def test_sums_have_the_bits_of_all_reduce_with_any_table(algorithm: str) -> None:
    """The values of ranks 1 and 2 almost cancel, so that a sum's bits depend on the order of additions."""

    def body(comm: Communicator) -> None:
        comm.collectives.selector = comm.collectives.selector.with_table("all_reduce", SizeTable((), algorithm))
        x = values(comm.rank, (64, 64), "float16") + 2000 * (comm.rank == 1) - 2000 * (comm.rank == 2)
        given = on_device(comm, x.astype(np.float16))
        plain = comm.all_reduce(given, out=on_device(comm, np.zeros_like(x)))
        sums = comm.all_reduce_rms_norm(given, None, None, EPS).residual
        barrier(comm)
        assert on_host(sums).tobytes() == on_host(plain).tobytes()

    run_ranks(world_sizes(1, 2, 4)[-1], body, make_runtime=runtime_with_blocks)


def test_a_residual_and_a_weight_may_be_missing(ranks: Ranks) -> None:
    shape = (4, 72)

    def body(comm: Communicator) -> None:
        x, residual, weight = (on_device(comm, each) for each in inputs(comm.rank, shape, "bfloat16"))
        for algorithm in ALGORITHMS:
            plain = comm.all_reduce(x, out=on_device(comm, np.zeros(shape, numpy_dtype("bfloat16"))))
            out, sums, _ = comm.all_reduce_rms_norm(x, None, weight, EPS, algorithm=algorithm)
            none, added, _ = comm.all_reduce_rms_norm(x, residual, None, EPS, algorithm=algorithm)
            barrier(comm)
            assert on_host(sums).tobytes() == on_host(plain).tobytes()
            require_normed(on_host(out), on_host(sums), on_host(weight))
            assert none is None
            assert on_host(added).tobytes() == summed(comm.world_size, shape, "bfloat16").tobytes()

    ranks.run(body)


def test_a_bias_is_added_to_the_weights(ranks: Ranks) -> None:
    shape = (3, 200)

    def body(comm: Communicator) -> None:
        x, residual, weight = (on_device(comm, each) for each in inputs(comm.rank, shape, "bfloat16"))
        for algorithm in ALGORITHMS:
            for bias in (1, -0.25, 0):
                got = comm.all_reduce_rms_norm(x, residual, weight, EPS, weight_bias=bias, algorithm=algorithm)
                barrier(comm)
                require_normed(on_host(got.out), on_host(got.residual), on_host(weight).astype(np.float32) + bias)
        for bad in ("one", float("nan"), 1e39, [1], 10**400, np.zeros(2), None, "", False):
            with pytest.raises(ArgumentError, match="weight_bias: must be a number that a float32 can hold"):
                comm.all_reduce_rms_norm(x, residual, weight, EPS, weight_bias=bad)

    ranks.run(body)


def test_rows_are_quantized_by_their_own_scale_or_by_a_given_one(ranks: Ranks) -> None:
    shape, given = (5, 130), 0.0625

    def body(comm: Communicator) -> None:
        x, residual, weight = (on_device(comm, each) for each in inputs(comm.rank, shape, "bfloat16"))
        scale = on_device(comm, np.array([given], np.float32))
        want = normed(summed(comm.world_size, shape, "bfloat16"), on_host(weight))
        for algorithm in ALGORITHMS:
            by_row = comm.all_reduce_rms_norm(x, residual, weight, EPS, quantize="float8", algorithm=algorithm)
            by_one = comm.all_reduce_rms_norm(x, residual, weight, EPS, quantize=scale, algorithm=algorithm)
            barrier(comm)
            scales = on_host(by_row.scales)
            np.testing.assert_allclose(scales, np.abs(want).max(-1, keepdims=True) / 448, rtol=1e-5)
            for out, scaled in ((by_row.out, scales), (by_one.out, given)):
                eighths = on_host(out).view(numpy_dtype(FLOAT8)).astype(np.float64)
                limited = np.clip(want / scaled, -448, 448)
                assert (np.abs(eighths - limited) <= np.abs(limited) / 15.9 + 2.0**-10).all(), algorithm
            assert by_one.scales is None

    ranks.run(body)


@pytest.mark.parametrize("world", [(n, n) for n in world_sizes(2, 3)] + [(n, 2) for n in world_sizes(4)], ids=str)
@pytest.mark.parametrize("make", MAKERS)
def test_a_row_has_the_same_bits_in_every_batch(make: str, world: tuple[int, int]) -> None:
    """A row's sum, normalized values and scale have the same bits with every algorithm and in every batch."""
    width, most = 904, 40

    def body(comm: Communicator) -> None:
        x, residual, weight = inputs(comm.rank, (most, width), "bfloat16")
        given, found = on_device(comm, weight), set()
        algorithms = ("hierarchical",) if world[1] < world[0] else ALGORITHMS
        for algorithm in (None, *algorithms):
            for rows in (1, 2, 17, most):
                place = rows // 2  # of row 0
                rolled = [on_device(comm, np.roll(each[:rows], place, 0)) for each in (x, residual)]
                out = comm.all_reduce_rms_norm(*rolled, given, EPS, algorithm=algorithm)
                eighths = comm.all_reduce_rms_norm(*rolled, given, EPS, quantize="float8", algorithm=algorithm)
                barrier(comm)
                arrays = (out.out, out.residual, eighths.out, eighths.scales)
                found.add(b"".join(on_host(each)[place].tobytes() for each in arrays))
        assert len(found) == 1

    run_ranks(world[0], body, make_runtime=MAKERS[make], local_world_size=world[1], invariant=True)


def test_new_arrays_of_one_kind_are_prepared_once(ranks: Ranks) -> None:
    kinds = 8  # on a GPU: peers' kernels can access each of the three arrays, or can't

    def body(comm: Communicator) -> None:
        prepared = set()
        for _ in range(3 * kinds):
            arrays = [on_device(comm, each) for each in inputs(comm.rank, (3, 88), "bfloat16")]
            out, sums, _ = comm.all_reduce_rms_norm(*arrays, float(str(EPS)))
            barrier(comm)
            assert on_host(sums).tobytes() == summed(comm.world_size, (3, 88), "bfloat16").tobytes()
            require_normed(on_host(out), on_host(sums), on_host(arrays[2]))
            prepared.add(comm.calls.prepared)
        assert len(prepared) <= (1 if comm.runtime.name == "host" else kinds)

    ranks.run(body)


@pytest.mark.parametrize("kind", ["rows", "float8", "one scale", "sums", "no residual", "in place"])
def test_a_divided_residual_changes_no_value(ranks: Ranks, kind: str) -> None:
    """Each rank has its share of the residual and of the sums; all ranks have all normalized rows."""
    number, world_size = "bfloat16", ranks.world_size

    def body(comm: Communicator) -> None:
        one = on_device(comm, np.full(1, 0.02, np.float32))
        options = {"float8": {"quantize": "float8"}, "one scale": {"quantize": one}}.get(kind, {})
        for shape in ((world_size, 64), (2 * world_size, 3, 100), (world_size, 7), (3 * world_size, 2048)):
            share = slice(comm.rank * shape[0] // world_size, (comm.rank + 1) * shape[0] // world_size)
            for algorithm in (None, "kernels", "proxy") if world_size > 1 else (None,):
                x, residual, weight = inputs(comm.rank, shape, number)
                whole = [on_device(comm, each) for each in (x, residual, weight)]
                arrays = [on_device(comm, each) for each in (x, residual[share], weight)]
                places: dict[str, Any] = {}
                if kind == "sums":
                    whole[2] = arrays[2] = None
                elif kind == "no residual":
                    whole[1] = arrays[1] = None
                    places["residual_out"] = on_device(comm, np.zeros_like(residual[share]))
                elif kind == "in place":
                    places.update(out=arrays[0], residual_out=arrays[1])
                want = comm.all_reduce_rms_norm(*whole, EPS, **options)
                got = comm.all_reduce_rms_norm(*arrays, EPS, algorithm=algorithm, **options, **places)
                barrier(comm)
                assert on_host(got.residual).tobytes() == on_host(want.residual)[share].tobytes(), (shape, algorithm)
                for mine, other in ((got.out, want.out), (got.scales, want.scales)):
                    assert (mine is None) == (other is None)
                    assert mine is None or on_host(mine).tobytes() == on_host(other).tobytes(), (shape, algorithm)

    ranks.run(body)


@pytest.mark.parametrize("unaligned", ["x", "residual", "weight", "out", "residual_out"])
def test_one_rank_may_have_arrays_that_are_not_aligned(ranks: Ranks, unaligned: str) -> None:
    shape = (4, 64)

    def body(comm: Communicator) -> None:
        given = dict(zip(("x", "residual", "weight"), inputs(comm.rank, shape, "bfloat16"), strict=True))
        given.update({name: np.zeros(shape, numpy_dtype("bfloat16")) for name in ("out", "residual_out")})
        if comm.rank == 0:
            moved = given[unaligned]
            given[unaligned] = np.zeros(moved.size + 1, moved.dtype)[1:].reshape(moved.shape)
            given[unaligned][...] = moved
        arrays = {name: on_device(comm, each) for name, each in given.items()}
        for algorithm in ALGORITHMS:
            out, sums, _ = comm.all_reduce_rms_norm(**arrays, eps=EPS, algorithm=algorithm)
            barrier(comm)
            assert on_host(sums).tobytes() == summed(comm.world_size, shape, "bfloat16").tobytes(), algorithm
            require_normed(on_host(out), on_host(sums), on_host(arrays["weight"]))

    ranks.run(body)


def test_tiny_rows_are_quantized_to_zeros() -> None:
    def body(comm: Communicator) -> None:
        x, weight = np.zeros((1, 64), numpy_dtype("bfloat16")), np.ones(64, numpy_dtype("bfloat16"))
        x[0, 0] = 1e-38
        got = comm.all_reduce_rms_norm(on_device(comm, x), None, on_device(comm, weight), 1e-3, quantize="float8")
        barrier(comm)
        assert not on_host(got.out).view(np.uint8).any()
        assert on_host(got.scales).tolist() == [[1]]

    run_ranks(1, body)


def test_replaced_scratch_memory_is_kept_for_graphs(ranks: Ranks) -> None:
    def body(comm: Communicator) -> None:
        first = comm.collectives.scratch(100)
        address = weakref.ref(first)
        del first
        assert comm.collectives.scratch(1 << 20).nbytes >= 1 << 20
        assert address() is not None

    ranks.run(body)


def test_a_call_without_rows_does_nothing(ranks: Ranks) -> None:
    def body(comm: Communicator) -> tuple[int, ...]:
        x = on_device(comm, np.zeros((0, 16), numpy_dtype("bfloat16")))
        weight = on_device(comm, np.ones(16, numpy_dtype("bfloat16")))
        return tuple(on_host(comm.all_reduce_rms_norm(x, x, weight, EPS).out).shape)

    assert ranks.run(body) == [(0, 16)] * ranks.world_size


def arguments(comm: Communicator, **changed: Any) -> dict[str, Any]:
    """Returns valid arguments, updated with `changed`. Each pair (dtype, shape) becomes an array of zeros."""
    given: dict[str, Any] = {
        "x": ("bfloat16", (4, 32)),
        "residual": ("bfloat16", (4, 32)),
        "weight": ("bfloat16", (32,)),
    }
    given.update({"eps": EPS, **changed})
    return {
        name: on_device(comm, np.zeros(value[1], numpy_dtype(value[0]))) if isinstance(value, tuple) else value
        for name, value in given.items()
    }


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"x": ("float32", (4, 32))}, "x: has element type float32; expected one of bfloat16, float16"),
    ({"x": ("bfloat16", ())}, "x: has shape (); expected rows of 1 to 262144 elements"),
    ({"x": ("bfloat16", (4, 0))}, "x: has shape (4, 0); expected rows of 1 to 262144 elements"),
    ({"x": ("bfloat16", (1, 262145))}, "x: has shape (1, 262145); expected rows of 1 to 262144 elements"),
    ({"residual": ("bfloat16", (4, 31))}, "residual: has shape (4, 31); expected (4, 32)"),
    ({"residual": ("float16", (4, 32))}, "residual: has element type float16; expected bfloat16"),
    ({"weight": ("bfloat16", (4,))}, "weight: has shape (4,); expected (32,)"),
    ({"weight": None, "quantize": "float8"}, "weight: expected an array, because `out`, `quantize` and `weight_bias`"),
    ({"weight": None, "weight_bias": 1}, "weight: expected an array, because `out`, `quantize` and `weight_bias` need"),
    ({"out": ("bfloat16", (4, 32)), "quantize": "float8"}, f"out: has element type bfloat16; expected {FLOAT8}"),
    ({"out": (FLOAT8, (4, 32))}, f"out: has element type {FLOAT8}; expected bfloat16"),
    ({"scales": ("float32", (4,)), "quantize": "float8"}, "scales: has shape (4,); expected (4, 1)"),
    ({"scales": ("float32", (4, 1))}, "scales: expected None without quantize='float8'"),
    ({"quantize": "int8"}, "quantize: must be None, 'float8' or an array of one float32, not 'int8'"),
    ({"quantize": ("float32", (2,))}, "quantize: has 2 elements; expected one, the scale of all rows"),
    ({"algorithm": "some"}, "algorithm: unknown algorithm 'some'"),
    ({"eps": "small"}, "eps: must be a number from 0 on that a float32 can hold, not 'small'"),
    ({"eps": True}, "eps: must be a number from 0 on that a float32 can hold, not True"),
    ({"eps": "1e-5"}, "eps: must be a number from 0 on that a float32 can hold, not '1e-5'"),
    ({"weight_bias": True}, "weight_bias: must be a number that a float32 can hold, not True"),
    ({"eps": -1.0}, "eps: must be a number from 0 on that a float32 can hold, not -1.0"),
    ({"eps": 1e39}, "eps: must be a number from 0 on that a float32 can hold, not 1e+39"),
    ({"eps": 10**400}, "eps: must be a number from 0 on that a float32 can hold, not 1000"),
    ({"x": 3}, "x: "),
]


@pytest.mark.parametrize(("changed", "words"), WRONG, ids=[words for _, words in WRONG])
def test_wrong_arguments_are_refused_before_anything_moves(changed: dict[str, Any], words: str) -> None:
    def body(comm: Communicator) -> None:
        with pytest.raises(ArgumentError, match=f"^{re.escape(words)}"):
            comm.all_reduce_rms_norm(**arguments(comm, **changed))
        comm.all_reduce_rms_norm(**arguments(comm))  # the communicator stays usable

    run_ranks(1, body)


@pytest.mark.parametrize("world_size", world_sizes(2))
def test_arrays_that_divide_the_residual_differently_are_refused(world_size: int) -> None:
    share, whole = (2, 32), (4, 32)

    def body(comm: Communicator) -> None:
        for words, changed in (
            ("residual_out: has shape (2, 32); expected (4, 32)", {"residual": whole, "residual_out": share}),
            ("residual_out: has shape (4, 32); expected (2, 32)", {"residual": share, "residual_out": whole}),
            ("out: has shape (2, 32); expected (4, 32)", {"residual": share, "out": share}),
            ("residual: has shape (2, 32); expected (3, 32)", {"x": (3, 32), "residual": share}),
            ("residual: has shape (16,); expected (32,)", {"x": (32,), "residual": (16,)}),
        ):
            given = arguments(comm, **{name: ("bfloat16", shape) for name, shape in changed.items()})
            with pytest.raises(ArgumentError, match=f"^{re.escape(words)}"):
                comm.all_reduce_rms_norm(**given)
        with pytest.raises(ArgumentError, match=r"^algorithm: unknown algorithm 'one_shot'; expected one of kernels"):
            comm.all_reduce_rms_norm(**arguments(comm, residual=("bfloat16", share)), algorithm="one_shot")
        comm.all_reduce_rms_norm(**arguments(comm))  # the communicator stays usable

    run_ranks(world_size, body)


def test_overlapping_arrays_are_refused() -> None:
    def body(comm: Communicator) -> None:
        both = on_device(comm, np.zeros((8, 32), numpy_dtype("bfloat16")))
        weight = on_device(comm, np.ones(32, numpy_dtype("bfloat16")))
        x, shifted, residual = both[:4], both[1:5], both[4:]
        for words, given in (
            ("residual: overlaps x", {"residual": shifted}),
            ("out: overlaps x", {"residual": residual, "out": shifted}),
            ("residual_out: overlaps out", {"residual": residual, "out": x, "residual_out": x}),
        ):
            with pytest.raises(ArgumentError, match=f"^{words}; expected an array in separate memory"):
                comm.all_reduce_rms_norm(x, weight=weight, eps=EPS, **given)

    run_ranks(1, body)


def test_ranks_with_different_rows_are_told() -> None:
    def body(comm: Communicator) -> str:
        given = {name: (dtype, (2, 64)) for name, dtype in (("x", "bfloat16"), ("residual", "bfloat16"))}
        changed = {**given, "weight": ("bfloat16", (64,))} if comm.rank else {}
        with pytest.raises(MismatchError) as caught:
            comm.all_reduce_rms_norm(**arguments(comm, **changed))
        return str(caught.value)

    if len(world_sizes(2)):
        assert any("all_reduce_rms_norm with an array of 128 elements" in text for text in run_ranks(2, body))


@pytest.mark.parametrize("world_size", world_sizes(2, 3))
@pytest.mark.parametrize(
    "changed",
    [
        {"eps": 2 * EPS},
        {"weight_bias": 1},
        {"residual": None},
        {"weight": None},
        {"quantize": "float8"},
        {"quantize": ("float32", (1,))},
    ],
    ids=str,
)
def test_ranks_with_different_options_are_told(changed: dict[str, Any], world_size: int) -> None:
    def body(comm: Communicator) -> None:
        comm.all_reduce_rms_norm(**arguments(comm, eps=np.float32(EPS) if comm.rank else EPS))
        comm.all_reduce_rms_norm(**arguments(comm, **(changed if comm.rank else {})))

    with pytest.raises(MismatchError, match="in another shape or with other options on rank"):
        run_ranks(world_size, body)


@pytest.mark.parametrize("world_size", world_sizes(2))
def test_ranks_of_which_one_divides_the_residual_are_told(world_size: int) -> None:
    def body(comm: Communicator) -> None:
        comm.all_reduce_rms_norm(**arguments(comm, residual=("bfloat16", (2 + 2 * comm.rank, 32))))

    with pytest.raises(MismatchError, match="in another shape or with other options on rank"):
        run_ranks(world_size, body)
