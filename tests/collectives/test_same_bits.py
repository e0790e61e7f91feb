"""All ranks get the same bits of a reduction, also for NaNs, signed zeros and infinities."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from proxyccl import Communicator
from proxyccl.channels.collectives.request import CTA_POLICIES
from support.cases.reference import ALGORITHMS, OPS, numpy_dtype
from support.device_arrays import barrier, on_device, on_host
from support.devices import runtime_with_blocks, world_sizes
from support.ranks import Ranks

pytestmark = pytest.mark.slow

FLOATS = ("float16", "bfloat16", "float32", "float64")
COUNT = 1003  # enough for all combinations of three ranks' values; no multiple of a packet, vector or share
TURNS = (*ALGORITHMS, "hierarchical", "kernels")
IN_NUMPY = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}


@pytest.fixture(scope="module", params=[*((n, n) for n in world_sizes(3)), *((n, 2) for n in world_sizes(4))])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Opens three ranks on one node, or four ranks on two nodes."""
    world_size, local_world_size = request.param
    with Ranks(world_size, make_runtime=runtime_with_blocks, local_world_size=local_world_size) as group:
        yield group


@pytest.fixture(autouse=True)
def _as_users_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles kernels with the default options, because the compiler decides which of several NaNs a sum returns."""
    monkeypatch.delenv("PROXYCCL_CXXFLAGS", raising=False)


@functools.cache
def special_values(name: str, rank: int) -> NDArray[Any]:
    """Returns a rank's row, shape [COUNT]: NaNs of both signs with the rank's own payloads, infinities, zeros and a
    number.
    """
    dtype = numpy_dtype(name)
    bits = np.dtype(f"uint{8 * dtype.itemsize}")
    one_nan = int(np.array(np.nan, dtype).view(bits))
    sign = 1 << (8 * dtype.itemsize - 1)
    nans = np.array([(one_nan & ~sign) | 2 * rank + 1, one_nan | sign | 2 * rank + 2], bits).view(dtype)
    values = np.concatenate([nans, np.array([np.inf, -np.inf, 0.0, -0.0, 1.5], dtype)])
    return values[np.arange(COUNT) // len(values) ** (rank % 3) % len(values)]


def arrays(comm: Communicator, name: str, rows: int, kind: str) -> tuple[Any, Any]:
    """Returns an input array of `rows` equal rows, and an output array of one row.

    Arrays of the kind "own" begin at different offsets on each rank, so that ranks may split their arrays into
    different pieces.
    """
    values = np.tile(special_values(name, comm.rank), rows)
    if kind == "symmetric" and comm.runtime.name == "host":
        x, out = (np.asarray(comm.empty((n,), name)).view(values.dtype) for n in (len(values), COUNT))
        x[:] = values
        return x, out
    before = comm.rank if kind == "own" else 0
    x = on_device(comm, np.concatenate([np.zeros(before, values.dtype), values]))
    return x[before:], on_device(comm, np.zeros(before + COUNT, values.dtype))[before:]


@pytest.mark.parametrize("kind", ["own", "symmetric"])
@pytest.mark.parametrize(
    "collective",
    # The HIP runtime's tests compile all kernels again, so they run only reduce_scatter, which has fewer kernels.
    ["all_reduce", pytest.param("reduce_scatter", marks=[pytest.mark.hip, pytest.mark.hip_full])],
)
def test_all_ranks_get_the_same_bits(ranks: Ranks, collective: str, kind: str, pytestconfig: pytest.Config) -> None:
    """Tries every algorithm that the ranks support; all algorithms give NaN for the same elements. Without --full, each
    algorithm computes only one operation on one type, because each combination must be compiled.
    """
    algorithms = [*ranks.run(lambda comm: comm.collectives.algorithms(collective))[0], None]
    turns = [
        TURNS.index(algorithm or "hierarchical") for algorithm in algorithms
    ]  # without a request, "hierarchical" is chosen between nodes
    rows = ranks.world_size if collective == "reduce_scatter" else 1
    calls = [
        (name, op, algorithm)
        for (i, name), (j, op), (k, algorithm) in itertools.product(
            enumerate(FLOATS), enumerate(OPS), zip(turns, algorithms, strict=True)
        )
        if (i, j) == (k % len(FLOATS), k % len(OPS)) or pytestconfig.getoption("--full")
    ]

    def body(comm: Communicator) -> list[NDArray[Any]]:
        results = []
        of_types = {name: arrays(comm, name, rows, kind) for name in FLOATS}
        for name, op, algorithm in calls:
            x, out = of_types[name]
            getattr(comm, collective)(x, op, out=out, algorithm=algorithm)
            barrier(comm)
            results.append(on_host(out).copy())
        return results

    for (name, op, algorithm), *results in zip(calls, *ranks.run(body), strict=True):
        call = f"{op} of {name} by {algorithm}"
        assert len({result.tobytes() for result in results}) == 1, f"{call}: ranks got different bits"
        inputs = [special_values(name, rank).astype(np.float64) for rank in range(ranks.world_size)]
        with np.errstate(all="ignore"):
            expected = functools.reduce(IN_NUMPY[op], inputs)
        np.testing.assert_array_equal(np.isnan(results[0].astype(np.float64)), np.isnan(expected), call)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("name", ["bfloat16", "float32"])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_a_policy_does_not_change_bits(collective: str, name: str, op: str) -> None:
    """A program may change the policy without changing its results."""
    count = 3 * (1 << 16) + 24

    def body(comm: Communicator) -> list[bytes]:
        random = np.random.default_rng(comm.rank)
        x = on_device(comm, random.standard_normal(count).astype(numpy_dtype(name)))
        results = []
        for policy in CTA_POLICIES:
            out = on_device(comm, np.zeros(count if collective == "all_reduce" else count // 3, numpy_dtype(name)))
            getattr(comm, collective)(x, op, out=out, cta_policy=policy)
            barrier(comm)
            results.append(on_host(out).tobytes())
        return results

    with Ranks(3, make_runtime=runtime_with_blocks) as group:
        for results in group.run(body):
            assert results == [results[0]] * len(CTA_POLICIES)
