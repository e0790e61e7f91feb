"""Measures the algorithms of all collectives on this machine, and chooses the fastest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from msgspec import Struct, field

from proxyccl.channels.collectives.collectives import Collectives
from proxyccl.channels.collectives.moves import ALL_GATHER, ALL_TO_ALL, BROADCAST
from proxyccl.channels.collectives.reductions import ALL_REDUCE, REDUCE_SCATTER
from proxyccl.channels.collectives.run import barrier, run
from proxyccl.channels.collectives.selection import (
    CASES,
    PACKET_ALGORITHMS,
    Algorithm,
    Case,
    Selector,
    SizeTable,
    sending_no_sums,
)
from proxyccl.channels.execution_plans.plan import ExecutionPlan
from proxyccl.channels.memory import MOST_BYTES, allocate, deregister, register
from proxyccl.channels.timeouts import as_seconds
from proxyccl.device.arguments.integers import as_integer, find_items
from proxyccl.device.arrays.array import Array
from proxyccl.device.arrays.dtypes import DType, as_dtype
from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.codec import Codec

_TIMES = Codec[list[list[float]]](list[list[float]], 1 << 24, name="times")
_GOES_ON = Codec(bool, 16, "flag")
_LARGEST_BY_PACKETS = 4 << 20
"""The most bytes for which packet algorithms are measured, because packets double the bytes that are sent."""
_COLLECTIVES = {each.name: each for each in (ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, BROADCAST)}
_SMALLEST = 10  # the smallest size is 1 << 10 bytes
_LARGEST = {"host": 22, "cuda": 26, "hip": 26}

Times = Mapping[int, Mapping[Algorithm, float]]
"""Times in seconds, by size in bytes and by algorithm."""


def default_sizes(runtime: str) -> tuple[int, ...]:
    """Returns the sizes to measure by default: from 1 KiB to 4 MiB on the host runtime and to 64 MiB on GPUs, each four
    times the previous one.
    """
    return tuple(1 << shift for shift in range(_SMALLEST, _LARGEST[runtime] + 1, 2))


def checked_arguments(sizes: Any, iterations: Any, seconds: Any) -> tuple[tuple[int, ...], int, float]:
    """Checks the arguments of `tune`, and returns them. Raises ArgumentError for invalid arguments."""
    expected = "must be positive numbers of bytes in rising order"
    given = find_items(sizes)
    if given is None:
        raise ArgumentError("sizes", f"{expected}, not {sizes!r}")
    chosen = tuple(as_integer(size, "sizes", expected, 1, MOST_BYTES) for size in given)
    if not chosen or any(size >= following for size, following in pairwise(chosen)):
        raise ArgumentError("sizes", f"{expected}, not {list(chosen)}")
    count = as_integer(iterations, "iterations", "must be a positive integer", 1)
    return chosen, count, as_seconds(seconds, "seconds", "must be a positive number of seconds")


class _Trial(Struct):
    case: Case
    algorithm: Algorithm
    call: Callable[[], object]
    seconds: list[float] = field(default_factory=list)


class _Arrays:
    """The arrays that are measured: an input and an output in symmetric memory, and an input and an output that are not
    symmetric. All ranks construct an `_Arrays` together.
    """

    def __init__(self, collectives: Collectives, nbytes: int) -> None:
        self._group = group = collectives.group
        self._pairs = {
            symmetric: [allocate(group, nbytes, "uint8", symmetric=symmetric).fill(0) for _ in range(2)]
            for symmetric in (True, False)
        }
        for array in self._pairs[True]:
            register(group, array, symmetric=True)  # waits until all peers have mapped the array

    def part(self, number: int, count: int, dtype: str, *, symmetric: bool) -> Array:
        memory = self._pairs[symmetric][number].memory
        return Array(self._group.runtime, memory, (count,), as_dtype(dtype))

    def close(self) -> None:
        """Frees the arrays. Ranks need not call this together; no queued work of any rank may still use the arrays."""
        for array in self._pairs[True]:
            deregister(self._group, array)
        for pair in self._pairs.values():
            for array in pair:
                array.free()


def measure(
    collectives: Collectives, sizes: Sequence[int], iterations: int, seconds: float
) -> dict[Case, dict[int, dict[Algorithm, float]]]:
    """Returns, by case, size and algorithm, the median over iterations of the slowest rank's time, in seconds.

    After `seconds` seconds, `measure` stops at the end of the current iteration. The result lacks sizes for which there
    was no time, but always has the first size. All ranks call this together, and all get the same numbers. A single
    rank measures nothing, because all its algorithms are copies.

    Args:
        collectives: the group's collectives. The execution plans in the group's tables are also measured.
        sizes: the sizes to measure, in rising order; each is in bytes, of the larger of a rank's input and output.
        iterations: number of calls of each algorithm at each size.
        seconds: approximate limit of the total time.
    """
    exchange, ends = collectives.group.exchange, time.monotonic() + seconds
    if collectives.group.world_size == 1:
        return {}
    arrays = _Arrays(collectives, max(sizes) + collectives.group.world_size * as_dtype("float32").itemsize)
    times: dict[Case, dict[int, dict[Algorithm, float]]] = {case: {} for case in CASES}
    for size in sizes:
        trials = list(_trials(collectives, arrays, size))
        is_first = size == sizes[0]
        complete = _take_turns(collectives, trials, iterations, ends, at_least=1 if is_first else 0)
        if complete or is_first:
            everyone = exchange.all_gather([trial.seconds for trial in trials], _TIMES, "tune: times")
            for trial, of_ranks in zip(trials, zip(*everyone, strict=True), strict=True):
                slowest = [max(taken) for taken in zip(*of_ranks, strict=True)]
                times[trial.case].setdefault(size, {})[trial.algorithm] = statistics.median(slowest)
        if not complete:
            break
    arrays.close()
    return times


def _take_turns(
    collectives: Collectives, trials: Sequence[_Trial], iterations: int, ends: float, *, at_least: int
) -> bool:
    """Times each trial `iterations` times, one trial after the other in each iteration. Returns whether all iterations
    were complete before rank 0's clock passed `ends`.
    """
    for iteration in range(iterations + 1):
        for trial in trials:
            taken = _timed(collectives, trial.call)
            if iteration > 0:  # the first iteration is slower, because it prepares the call and compiles kernels
                trial.seconds.append(taken)
        goes_on = collectives.group.exchange.all_gather(time.monotonic() < ends, _GOES_ON, "tune: time left")[0]
        if not goes_on and at_least <= iteration < iterations:
            return False
    return True


def _timed(collectives: Collectives, call: Callable[[], object]) -> float:
    barrier(collectives, None)
    collectives.group.synchronize()
    start = time.perf_counter()
    call()
    collectives.group.synchronize()
    return time.perf_counter() - start


def _trials(collectives: Collectives, arrays: _Arrays, size: int) -> Iterator[_Trial]:
    for case in CASES:
        for algorithm in collectives.algorithms(case.collective):
            if algorithm in PACKET_ALGORITHMS and size > _LARGEST_BY_PACKETS:
                continue
            if (
                case.elements == "16-bit floats"
                and sending_no_sums(algorithm, collectives.group.world_size) != algorithm
            ):
                continue
            yield _Trial(case, algorithm, _call(collectives, arrays, case, algorithm, size))
        for plan in collectives.selector.tables[case].plans:
            call = _execution(collectives, arrays, case, plan, size)
            if call is not None:
                yield _Trial(case, plan, call)


def _in_and_out(arrays: _Arrays, case: Case, share: int, ranks: int) -> tuple[Array, Array]:
    shares = {"all_gather": (1, ranks), "reduce_scatter": (ranks, 1)}.get(case.collective, (ranks, ranks))
    x, out = (
        arrays.part(number, count * share, _dtype(case).name, symmetric=case.symmetric)
        for number, count in enumerate(shares)
    )
    return x, out


def _dtype(case: Case) -> DType:
    return as_dtype("bfloat16" if case.elements == "16-bit floats" else "float32")


def _call(collectives: Collectives, arrays: _Arrays, case: Case, algorithm: str, size: int) -> Callable[[], object]:
    ranks = collectives.group.world_size
    x, out = _in_and_out(arrays, case, max(1, size // _dtype(case).itemsize // ranks), ranks)
    return _run(collectives, case, x, out, algorithm)


def _run(collectives: Collectives, case: Case, x: Array, out: Array, algorithm: Algorithm) -> Callable[[], object]:
    collective = _COLLECTIVES[case.collective]
    op, root = "sum" if collective.reduces else None, 0 if collective.rooted else None
    return lambda: run(collectives, collective, x, out, op, root, algorithm, None, case.symmetric)


def _execution(
    collectives: Collectives, arrays: _Arrays, case: Case, plan: ExecutionPlan, size: int
) -> Callable[[], object] | None:
    """Returns a plan's call, with the largest array of at most `size` bytes that can be divided into the plan's chunks;
    None if the plan can't execute the call.
    """
    ranks, dtype = collectives.group.world_size, _dtype(case)
    unit = plan.document.buffer_alignment * plan.document.gpus[0].input_chunks * ranks
    x, out = _in_and_out(arrays, case, size // unit * unit // dtype.itemsize // ranks, ranks)
    op = "sum" if _COLLECTIVES[case.collective].reduces else None
    if x.size == 0 or plan.refusal(x.size, out.size, dtype, op) is not None:
        return None
    return _run(collectives, case, x, out, plan)


def table_from(times: Times, beyond: SizeTable | None = None) -> SizeTable:
    """Returns the table that chooses the fastest algorithm for each measured size, and changes algorithms halfway
    between two measured sizes.

    Args:
        times: the measurements.
        beyond: the table for sizes above the largest measured size; None to use the fastest algorithm of that size.
    """
    sizes = sorted(times)
    best = [min(times[size], key=lambda name: times[size][name]) for size in sizes]
    halfway = [int((smaller * larger) ** 0.5) for smaller, larger in pairwise(sizes)]
    limits, last = list(zip(halfway, best[:-1], strict=True)), best[-1]
    if beyond is not None:
        limits += [(sizes[-1], last), *(limit for limit in beyond.limits if limit[0] > sizes[-1])]
        last = beyond.beyond
    followers = [*(name for _, name in limits[1:]), last]
    changes = tuple(limit for limit, follower in zip(limits, followers, strict=True) if limit[1] != follower)
    return SizeTable(changes, last)


def selector_from(collectives: Collectives, measured: Mapping[Case, Times]) -> Selector:
    """Returns the tables that choose the fastest measured algorithms.

    If the largest measured size is at least the largest of `default_sizes`, its fastest algorithm also serves larger
    sizes; otherwise the default algorithms serve larger sizes.
    """
    defaults = collectives.defaults
    if not measured:
        return defaults
    goes_on = max(measured[CASES[0]]) >= default_sizes(collectives.group.runtime.name)[-1]
    return Selector(
        {case: table_from(times, None if goes_on else defaults.tables[case]) for case, times in measured.items()}
    )


def of_library(measured: Mapping[Case, Times]) -> dict[Case, Times]:
    """Returns the measurements of the library's own algorithms, without plans."""
    return {
        case: {
            size: {name: took for name, took in of_size.items() if isinstance(name, str)}
            for size, of_size in times.items()
        }
        for case, times in measured.items()
    }
