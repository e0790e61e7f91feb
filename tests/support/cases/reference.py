"""Collective calls with reproducible inputs and expected outputs.

The expected output is computed in a wider type (integers exactly), with none of the code under test. Error bounds for
floating point follow from the accumulation that the library promises: n-1 roundings in the accumulator's type and one
to the
element's type.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from proxyccl import Communicator
from proxyccl.device.arrays.dtypes import reduction_dtypes
from support.device_arrays import on_device, on_host

ALGORITHMS = ("one_shot", "recursive_doubling", "two_shot_packets", "two_shot", "ring", "proxy")
CHOICES = (*ALGORITHMS, None)
MOVES = ("all_gather", "all_to_all", "broadcast")
DTYPES = tuple(reduction_dtypes())
SOME_DTYPES = ("float32", "bfloat16", "int8")  # one element type for each accumulator type
OPS = ("sum", "prod", "min", "max", "avg")
BITWISE_OPS = ("band", "bor", "bxor")
_GUARD = 5  # guard elements, which no call may touch, on each side of an array

P = ParamSpec("P")
T = TypeVar("T")
Values = NDArray[Any]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Returns the numpy dtype of a name; ml_dtypes provides bfloat16."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def unit_roundoff(dtype: np.dtype[Any]) -> float:
    """Returns half the distance from 1 to the next number of the type."""
    import ml_dtypes

    return float(ml_dtypes.finfo(dtype).eps) / 2


def poison(count: int, dtype: np.dtype[Any]) -> Values:
    """Returns an array whose every byte is 0xA5, which is not a plausible result in any type."""
    return np.full(count * dtype.itemsize, 0xA5, np.uint8).view(dtype)


@dataclass(frozen=True)
class Call:
    """One collective call.

    Attributes:
        count: number of elements of one rank's share; for all_reduce and broadcast, of the whole array.
        offset: index of the array's first element in its memory.
        in_place: whether input and output are one array; for all_gather and reduce_scatter one is a part of the other.
        own_memory: whether the arrays are from `Communicator.empty`.
        seed: the seed of the input's values.
        rounded_parts: number of partial results that are rounded to a 16-bit type: one per node in a hierarchy.
    """

    collective: str = "all_reduce"
    dtype: str = "float32"
    op: str = "sum"
    algorithm: str | None = None
    count: int = 1
    offset: int = 0
    in_place: bool = True
    own_memory: bool = False
    root: int = 0
    seed: int = 0
    rounded_parts: int = 0

    def sizes(self, world_size: int) -> tuple[int, int]:
        """Returns the number of elements of each rank's input, and of its output."""
        many = self.count * world_size
        return {
            "all_gather": (self.count, many),
            "reduce_scatter": (many, self.count),
            "all_to_all": (many, many),
        }.get(self.collective, (self.count, self.count))

    def values(self) -> Call:
        """Returns the call with defaults in the fields on which its result does not depend."""
        return replace(self, algorithm=None, offset=0, in_place=True, own_memory=False)

    def input(self, rank: int, world_size: int) -> Values:
        """Returns a rank's input."""
        return _inputs(self.values(), world_size)[rank]

    def _base(
        self, comm: Communicator, count: int, values: Values | None = None, at: int = 0, *, extra_offset: int = 0
    ) -> tuple[Any, Any]:
        """Returns poisoned memory with guard elements before and after, and the view of `count` elements in it.

        The values, if any, begin at element `at` of the view.
        """
        dtype = numpy_dtype(self.dtype)
        before = self.offset + extra_offset
        base = poison(before + count + _GUARD, dtype)
        if values is not None:
            base[before + at : before + at + len(values)] = values
        if self.own_memory and comm.runtime.name == "host":
            shared = np.asarray(comm.empty(base.shape, self.dtype)).view(dtype)
            shared[:] = base
            base = shared
        placed = on_device(comm, base)
        return placed, placed[before : before + count]

    def run(self, comm: Communicator, stream: Any = None) -> None:
        """Makes the call on this rank. Raises AssertionError if this rank's result is wrong."""
        self.start(comm, stream).finish()

    def start(self, comm: Communicator, stream: Any = None) -> Started:
        """Makes the call on this rank. If `stream` is given, the result is available only after a synchronisation."""
        size_in, size_out = self.sizes(comm.world_size)
        values = self.input(comm.rank, comm.world_size)
        if self.in_place:
            own = slice(comm.rank * self.count, (comm.rank + 1) * self.count)
            at = own.start if self.collective == "all_gather" else 0
            base, whole = self._base(comm, max(size_in, size_out), values, at)
            x = whole[own] if self.collective == "all_gather" else whole
            out = whole[own] if self.collective == "reduce_scatter" else whole
            bases = [base]
        else:
            base, x = self._base(comm, size_in, values)
            out_base, out = self._base(comm, size_out, extra_offset=1)
            bases = [base, out_base]
        result = self.issue(comm, x, None if out is x else out, stream)
        assert result is out, f"{self}: the call returned another array than its output"
        by_levels = self.collective == "all_reduce" and self.algorithm in (None, "hierarchical")
        # An all-reduce of float16 sends partial results as float32, unless it averages.
        by_levels = by_levels and (self.dtype != "float16" or self.op == "avg")
        parts = comm.topology.node_count if by_levels and comm.topology.has_levels() else 0
        return Started(replace(self, rounded_parts=parts), comm, x, out, bases, stream)

    def check(self, out: Values, rank: int, world_size: int) -> None:
        """Raises AssertionError unless `out` is a rank's expected output."""
        expected, bound = _expected(self.values(), world_size, rank)
        _compare(out, expected, bound, f"rank {rank} of {world_size}: {self}")

    def issue(self, comm: Communicator, x: Any, out: Any, stream: Any) -> Any:
        """Makes the call on arrays that have the call's sizes, and returns its result. `out` is None for calls in
        place.
        """
        call = getattr(comm, self.collective)
        options: dict[str, Any] = {"out": out, "algorithm": self.algorithm, "stream": stream}
        if self.collective in ("all_gather", "all_to_all") and out is None:
            options["out"] = x
        if self.collective in ("all_reduce", "reduce_scatter"):
            return call(x, self.op, **options)
        if self.collective == "broadcast":
            return call(x, self.root, **options)
        return call(x, **options)


@dataclass
class Started:
    """A call that was issued on one rank."""

    call: Call
    comm: Communicator
    x: Any
    out: Any
    bases: list[Any]
    stream: Any

    def finish(self) -> bytes:
        """Waits for the result, checks it, and returns its bytes."""
        if self.stream is not None or self.comm.runtime.name != "host":
            self.comm.synchronize(self.stream)
        call, rank, world_size = self.call, self.comm.rank, self.comm.world_size
        message = f"rank {rank} of {world_size}: {call}"
        out = on_host(self.out)
        call.check(out, rank, world_size)
        for extra, placed in enumerate(self.bases):
            base = on_host(placed)
            before = call.offset + extra
            edges = np.concatenate([base[:before], base[len(base) - _GUARD :]])
            assert edges.tobytes() == poison(len(edges), base.dtype).tobytes(), f"{message}: wrote outside the array"
        if not call.in_place:
            untouched = call.input(rank, world_size)
            assert on_host(self.x).tobytes() == untouched.tobytes(), f"{message}: changed its input"
        return out.tobytes()


def _compare(out: Values, expected: Values, bound: Values | None, message: str) -> None:
    if bound is None:
        if out.tobytes() != expected.tobytes():
            wrong = np.flatnonzero(out != expected)
            first = int(wrong[0]) if len(wrong) else -1
            raise AssertionError(
                f"{message}: {len(wrong)} of {len(out)} elements differ, first [{first}]: "
                f"{out[first]} instead of {expected[first]}"
            )
        return
    error = np.abs(out.astype(np.float64) - expected)
    wrong = np.flatnonzero(~(error <= bound))
    if len(wrong):
        first = int(wrong[0])
        raise AssertionError(
            f"{message}: {len(wrong)} of {len(out)} elements are out of bounds, first [{first}]: "
            f"{out[first]} instead of {expected[first]} ± {bound[first]}"
        )


_cache_lock = threading.RLock()


def computed_once(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function with a small cache that all threads share."""
    cached = functools.lru_cache(maxsize=64)(function)

    @functools.wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> T:
        with _cache_lock:
            return cached(*args, **kwargs)

    return locked


@computed_once
def _inputs(call: Call, world_size: int) -> list[Values]:
    dtype = numpy_dtype(call.dtype)
    size, _ = call.sizes(world_size)
    generators = [np.random.default_rng([call.seed, rank]) for rank in range(world_size)]
    if call.collective not in ("all_reduce", "reduce_scatter"):
        return [g.integers(0, 256, size * dtype.itemsize, dtype=np.uint8).view(dtype) for g in generators]
    if dtype.kind in "iu":
        most = 2 if call.op == "prod" else min(1000, np.iinfo(dtype).max // 16)  # sums of 16 ranks don't overflow
        return [g.integers(-most if dtype.kind == "i" else 0, most + 1, size).astype(dtype) for g in generators]
    if call.op == "prod":
        return [g.uniform(0.5, 1.5, size).astype(dtype) for g in generators]
    return [g.standard_normal(size).astype(dtype) for g in generators]


def _reduced(call: Call, inputs: list[Values]) -> tuple[Values, Values | None]:
    """Returns the reduction of the inputs, and the bound of its error, which is None if the result must be exact."""
    dtype = numpy_dtype(call.dtype)
    ranks = len(inputs)
    if call.op in BITWISE_OPS:
        combine = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}[call.op]
        return functools.reduce(combine, inputs), None
    if call.op in ("min", "max"):
        reduce = np.minimum if call.op == "min" else np.maximum
        return functools.reduce(reduce, inputs).astype(dtype), None
    if dtype.kind in "iu":
        stack = np.stack(inputs).astype(np.int64)
        if call.op == "prod":
            return stack.prod(axis=0).astype(dtype), None
        total = stack.sum(axis=0)
        if call.op == "avg":
            total = np.sign(total) * (np.abs(total) // ranks)  # truncates towards zero
        return total.astype(dtype), None
    accumulator = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    wide = np.stack(inputs).astype(np.longdouble if dtype == np.float64 else np.float64)
    if call.op == "prod":
        exact = wide.prod(axis=0)
        magnitude = np.abs(exact)
    else:
        exact, magnitude = wide.sum(axis=0), np.abs(wide).sum(axis=0)
        if call.op == "avg":
            exact, magnitude = exact / ranks, magnitude / ranks
    u = unit_roundoff(accumulator)
    growth = ranks * u / (1 - ranks * u)  # n roundings: of n-1 additions and of avg's division
    bound = growth * magnitude
    if accumulator != dtype:
        # The smallest subnormal of float16 is 2**-24.
        smallest = 2.0**-24 if dtype == np.float16 else 0.0
        # Each partial result's rounding error is relative to that partial result. The magnitudes of a sum's partial
        # sums add up to at most `magnitude`; the relative errors of a product's partial products add up.
        factor = call.rounded_parts if call.op == "prod" else min(call.rounded_parts, 1)
        bound = bound + factor * (unit_roundoff(dtype) * magnitude + call.rounded_parts * smallest / 2)
        bound = bound * (1 + unit_roundoff(dtype)) + unit_roundoff(dtype) * np.abs(exact) + smallest / 2
    return exact.astype(np.float64), bound.astype(np.float64) + np.abs(exact).astype(np.float64) * 2.0**-53


def ops_of(dtype: str) -> tuple[str, ...]:
    """Returns the reduction operators that a type supports."""
    return OPS + BITWISE_OPS if numpy_dtype(dtype).kind in "iu" else OPS


def operations_of(dtype: str, algorithm: str | None) -> tuple[str, ...]:
    """Returns the reduction operators that `make test` combines with this type and this algorithm. Each algorithm runs
    every operator and every type, but only --full runs every combination.
    """
    first = (DTYPES.index(dtype) + CHOICES.index(algorithm)) % len(CHOICES)
    return ops_of(dtype)[first :: len(CHOICES)] or ("sum",)


@computed_once
def _reduced_once(call: Call, world_size: int) -> tuple[Values, Values | None]:
    return _reduced(call, _inputs(call, world_size))


@computed_once
def _expected(call: Call, world_size: int, rank: int) -> tuple[Values, Values | None]:
    inputs = _inputs(call, world_size)
    if call.collective == "all_gather":
        return np.concatenate(inputs), None
    if call.collective == "all_to_all":
        part = slice(rank * call.count, (rank + 1) * call.count)
        return np.concatenate([values[part] for values in inputs]), None
    if call.collective == "broadcast":
        return inputs[call.root], None
    if call.collective == "reduce_scatter":
        part = slice(rank * call.count, (rank + 1) * call.count)
        return _reduced(call, [values[part] for values in inputs])
    return _reduced_once(call, world_size)
