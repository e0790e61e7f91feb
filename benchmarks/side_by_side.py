"""Compares ProxyCCL's calls with the calls of other libraries (called peers), in the same ranks. Works on any runtime.
Needs no torch.

The programs choose the calls. `Job` checks the calls and times them alternately; jobs.py picks the kind of job for the
runtime.

Bursts of the contenders' calls alternate, so that other load on the machine affects all contenders. A time is the
median over repeats of the slowest rank's time. Calls are timed in bursts, so that on GPUs times exclude the CPU's time
to issue calls (gpu_job.py, host_job.py).
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import os
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from mpi4py import MPI
from program import common_arguments, describe, end_if_it_hangs, heading

from proxyccl import ArgumentError, Communicator, FabricOptions
from proxyccl.tools import options
from proxyccl.tools.results import Fields, write_json
from proxyccl.tools.tables import Column, Table

DTYPES = ("float32", "bfloat16", "float16")
BARE_COPIES = "bare copies"
PROXIED = "registered_proxy"
"""Our name of calls by proxy with registered arrays."""
WAIT_TIMEOUT = 20.0
"""The communicator's time-out, in seconds."""

_MOST_CALLS = 50
_BURST_US = 3000.0


def arguments(description: str, default_sizes: Sequence[int], quick_sizes: Sequence[int]) -> argparse.ArgumentParser:
    """Returns a parser with the options of programs that measure a collective by size."""
    parser = common_arguments(description)
    parser.add_argument("-s", "--sizes", type=options.size, nargs="+", metavar="SIZE", help="bytes, such as 64K")
    parser.add_argument("-d", "--dtypes", nargs="+", choices=DTYPES, help="element types")
    parser.add_argument(
        "-a", "--algorithms", nargs="+", metavar="NAME", help="our algorithms; auto is the library's choice"
    )
    parser.add_argument("-r", "--repeats", type=options.count, help="timed bursts of each contender")
    parser.set_defaults(default_sizes=tuple(default_sizes), quick_sizes=tuple(quick_sizes))
    return parser


def resolve(parsed: argparse.Namespace) -> argparse.Namespace:
    """Sets the options of `arguments` that the user did not give. The defaults depend on `--quick`."""
    parsed.sizes = parsed.sizes or (parsed.quick_sizes if parsed.quick else parsed.default_sizes)
    parsed.dtypes = parsed.dtypes or list(DTYPES[:1] if parsed.quick else DTYPES[:2])
    parsed.repeats = parsed.repeats or (5 if parsed.quick else 15)
    return parsed


@dataclass(frozen=True)
class Contender:
    """A collective call by one library or one algorithm.

    Attributes:
        name: name of an algorithm or of a peer.
        ours: whether the call is ProxyCCL's.
        call: queues the call on the job's stream.
        refill: queues the writes of fresh inputs, and poisons the outputs.
        wrong: returns the number of wrong elements after the given number of calls since `refill`.
        also_wrong: makes another check, which is not timed, and returns the number of wrong elements.
        missing: why the call can't be made on this machine, or "".
    """

    name: str
    ours: bool
    call: Callable[[], object]
    refill: Callable[[], object]
    wrong: Callable[[int], int]
    also_wrong: Callable[[], int] = lambda: 0
    missing: str = ""


def absent(name: str, missing: str) -> Contender:
    """Returns a contender for a peer that can't make the call. Tables show the reason."""
    return Contender(name, False, lambda: None, lambda: None, lambda _: 0, missing=missing)


@dataclass(frozen=True)
class Peer:
    """A collective call of another library.

    Attributes:
        name: the peer's name in the tables.
        call: queues the call on the job's stream, given output and input.
        arrays: makes an input and an output with a number of elements; None if the peer takes any arrays.
        in_place: whether an all_reduce replaces its input.
        missing: why this machine can't make the call, or "". If `missing` is not "", `call` is None.
    """

    name: str
    call: Callable[[Any, Any], object] | None = None
    arrays: Callable[[int], tuple[Any, Any]] | None = None
    in_place: bool = True
    missing: str = ""


class Burst(ABC):
    """A number of calls that are queued together.

    Attributes:
        calls: the number of calls.
        multiprocessors: the number of multiprocessors that the calls' kernels can occupy at a time; None if unknown.
    """

    calls: int
    multiprocessors: int | None = None

    @abstractmethod
    def queue(self) -> None:
        """Queues the calls on the burst's stream."""

    @abstractmethod
    def close(self) -> None:
        """Frees the burst's resources, after which the burst can't be queued."""


@dataclass(frozen=True)
class Timing:
    """A contender's result. If the contender can't make the call, `time_us` is None and `reason` says why.

    `multiprocessors` is taken from the contender's `Burst`.
    """

    name: str
    ours: bool
    time_us: float | None
    best_us: float | None
    calls: int
    wrong: int
    reason: str = ""
    multiprocessors: int | None = None


class Job(ABC):
    """The ranks that MPI started, with a Communicator.

    Args:
        seconds: the time to spend. `in_time` returns whether time is left. A process that hangs is killed later.
        growth_limit: limits the number of calls in a burst so that world_size ** calls < 10 ** growth_limit, because
            repeated sums grow.
        nodes: the number of rehearsed nodes, each with the same number of ranks. Between nodes, our data is staged and
            sent by TCP over the loopback, as other libraries' data is. None if all ranks are on one node.

    Attributes:
        nodes: the argument `nodes`.
        dtypes: names of the element types that arrays can have.
        device: the device of torch's tensors.
        handle: the stream on which calls are queued, as a value for the argument `stream=` of our calls.
        timing: how times are measured, for headings and results.
    """

    dtypes: Sequence[str]
    comm: Communicator
    device: Any
    handle: Any
    timing: str

    def __init__(self, seconds: float, *, growth_limit: float = 36.0, nodes: int | None = None) -> None:
        end_if_it_hangs(seconds)
        self._start, self._seconds = time.monotonic(), seconds
        self.world = MPI.COMM_WORLD
        self.rank, self.ranks = self.world.Get_rank(), self.world.Get_size()
        growth = growth_limit / math.log10(self.ranks) if self.ranks > 1 else _MOST_CALLS
        self._most_calls = min(_MOST_CALLS, int(growth))
        self._said: set[str] = set()
        self.nodes = nodes

    def placement(self) -> Fields:
        """Returns the options of a communicator with rehearsed nodes."""
        if self.nodes is None:
            return {}
        each = self.ranks // self.nodes
        apart = [(a, b) for b in range(self.ranks) for a in range(b) if a // each != b // each]
        return {
            "local_world_size": each,
            "transport": dict.fromkeys(apart, "staged_fabric"),
            "fabric": FabricOptions.from_environment(provider="tcp", interface="lo"),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.comm.__exit__(kind, error, trace)
        if error is None:
            faulthandler.cancel_dump_traceback_later()

    @property
    def first(self) -> bool:
        """Whether this rank prints tables and writes results."""
        return self.rank == 0

    def in_time(self) -> bool:
        """Returns whether time is left; the same on all ranks."""
        return bool(self.world.bcast(time.monotonic() - self._start < self._seconds))

    @abstractmethod
    def empty(self, count: int, dtype: str) -> Any:
        """Returns an array that is not registered with our library. The array can be sliced and assigned to."""

    @abstractmethod
    def registered(self, count: int, dtype: str) -> Any:
        """Returns a registered array, which collectives read and write in place. All ranks call this together."""

    @abstractmethod
    def random(self, count: int, dtype: str, seed: int) -> Any:
        """Returns small whole numbers, so that sums are exact in every element type."""

    @abstractmethod
    def poison(self, x: Any) -> None:
        """Fills an array with a pattern that no result has."""

    @abstractmethod
    def peers(self, collective: str, count: int, dtype: str) -> list[Peer]:
        """Returns other libraries' calls of a collective, for arrays of at most `count` elements. All ranks call this
        together and get the same result. The `missing` field of a library that can't be used says why.
        """

    @abstractmethod
    def peer_versions(self) -> Fields:
        """Returns the version of each peer library, by name."""

    @abstractmethod
    def current(self) -> AbstractContextManager[object]:
        """Returns a context in which the job's stream is the current stream of torch, if torch is used."""

    @abstractmethod
    def synchronize(self) -> None:
        """Waits for all work that is queued on this rank."""

    @abstractmethod
    def time_now(self, call: Callable[[], object], calls: int) -> float:
        """Issues some calls one by one. Returns the time of one call on this rank in µs."""

    @abstractmethod
    def burst(self, call: Callable[[], object], calls: int) -> Burst:
        """Prepares calls on the job's stream."""

    @abstractmethod
    def time_burst(self, timed: Burst, *, beside: Burst | None = None, beside_bursts: int = 0) -> tuple[float, bool]:
        """Queues a burst on all ranks at the same time, and waits for it.

        Args:
            timed: the burst that is timed.
            beside: a burst that runs concurrently on another stream, and is queued before `timed`.
            beside_bursts: how often `beside` is queued.

        Returns:
            The time in µs of one timed call on this rank, and whether `beside` ran at least until the end of `timed`.
        """

    @abstractmethod
    def product(self, size: int, calls: int) -> Burst:
        """Returns a burst of matrix products, on a stream other than the job's. The matrices are square, with this many
        rows.
        """

    def describe(self) -> Fields:
        """Returns the fields of results that describe the devices and the peers."""
        return {**describe(self.comm), "peers": self.peer_versions()}

    def heading(self, title: str, *notes: str) -> None:
        """Prints the measured call, and the devices."""
        peers = ", ".join(f"{name} {version}" for name, version in self.peer_versions().items())
        heading(self.comm, title, f"peers: {peers or 'none'}; no multicast", *notes)

    def say_once(self, line: str) -> None:
        """Prints a line on the first rank, unless the line was printed before."""
        if self.first and line not in self._said:
            print(line)
        self._said.add(line)

    def element_types(self, wanted: Sequence[str]) -> list[str]:
        """Returns the element types that arrays can have, and prints the other element types."""
        for name in wanted:
            if name not in self.dtypes:
                self.say_once(f"# {name} is not measured: arrays on the {self.comm.runtime.name} runtime can't have it")
        return [name for name in wanted if name in self.dtypes]

    def write(self, path: Path | None, results: Fields) -> None:
        """Writes the results and the fields of `describe` on the first rank."""
        if self.first and path is not None:
            write_json(path, {**self.describe(), **results})

    def finish(self, parsed: argparse.Namespace, rows: list[Fields], skipped: list[str], results: Fields) -> int:
        """Ends the table and writes the results on the first rank. Returns the exit code: 1 if a result was wrong."""
        wrong = sum(row["wrong"] for row in rows)
        if self.first:
            if skipped:
                print(f"# not measured, because the {parsed.seconds} s were up: {', '.join(skipped)}")
            print(f"# out of bounds values: {wrong} {'OK' if wrong == 0 else 'FAILED'}")
            self.write(parsed.json, {**results, "results": rows, "not_measured": skipped})
        return 1 if wrong else 0

    def everywhere(self, reason: str) -> str:
        """Returns the first nonempty reason among all ranks, or "". All ranks get the same result."""
        return next((each for each in self.world.allgather(reason) if each), "")

    def slowest(self, value: float) -> float:
        """Returns the maximum over ranks."""
        return float(self.world.allreduce(value, MPI.MAX))

    def first_call(self, contender: Contender) -> tuple[int, str]:
        """Makes and checks the first call. Returns the number of wrong elements on this rank, and the reason if the
        call can't be made.
        """
        if contender.missing:
            return 0, contender.missing
        reason, wrong = "", 0
        # These errors are raised before the call starts, so the program can continue.
        refusal = ArgumentError if contender.ours else RuntimeError
        try:
            contender.refill()
            contender.call()
            self.synchronize()
        except refusal as error:
            reason = str(error).splitlines()[0]
        reason = self.everywhere(reason)
        if not reason:
            wrong = contender.wrong(1) + contender.also_wrong()
        return wrong, reason

    def prepare(self, contender: Contender) -> tuple[Burst, int]:
        """Prepares a burst of a contender's calls that takes a few milliseconds, and runs the burst once. Returns the
        burst, and the number of wrong elements on this rank.
        """
        contender.refill()
        self.time_now(contender.call, 1)  # the result is discarded, because ranks finish the checks at different times
        slowest = self.slowest(self.time_now(contender.call, 3))
        calls = max(1, min(self._most_calls, int(_BURST_US / slowest)))
        contender.refill()
        self.synchronize()
        burst = self.burst(contender.call, calls)
        burst.queue()  # the first run is also the warm-up
        self.synchronize()
        return burst, contender.wrong(calls)

    def measure(self, contenders: Sequence[Contender], repeats: int) -> list[Timing]:
        """Checks the contenders, then times them alternately. All ranks call this together and get the same result."""
        wrong, reasons = [0] * len(contenders), [""] * len(contenders)
        bursts: dict[int, Burst] = {}
        times = np.full((len(contenders), repeats), np.nan)
        self.synchronize()  # the inputs were made on another stream
        with self.current():
            for i, contender in enumerate(contenders):
                wrong[i], reasons[i] = self.first_call(contender)
                if not reasons[i]:
                    bursts[i], after = self.prepare(contender)
                    wrong[i] += after
            for repeat in range(repeats):
                for i, burst in bursts.items():
                    contenders[i].refill()
                    times[i, repeat], _ = self.time_burst(burst)
        slowest = np.empty_like(times)
        self.world.Allreduce(times, slowest, MPI.MAX)
        all_wrong = self.world.allreduce(np.array(wrong), MPI.SUM)
        for burst in bursts.values():
            burst.close()
        return [
            Timing(
                contender.name,
                contender.ours,
                statistics.median(slowest[i].tolist()) if i in bursts else None,
                float(slowest[i].min()) if i in bursts else None,
                bursts[i].calls if i in bursts else 0,
                int(all_wrong[i]),
                reasons[i],
                bursts[i].multiprocessors if i in bursts else None,
            )
            for i, contender in enumerate(contenders)
        ]


def bare_copies(job: Job, count: int) -> Contender:
    """Returns a contender that shows the link's limit: the copy engines of all ranks concurrently copy the bytes that
    an all-reduce of `count` bytes must send.
    """
    comm, share = job.comm, count // job.ranks
    array = comm.empty(max(share, 1), "uint8")
    memory = comm.register(array)
    peers = [(job.rank + i) % job.ranks for i in range(1, job.ranks)]

    def copy() -> None:
        for peer in 2 * peers:
            comm.runtime.copy(memory.peer_ptr(peer), array.ptr, share, job.handle)

    return Contender(BARE_COPIES, False, copy, lambda: None, lambda _: 0)


def random_inputs(job: Job, count: int, dtype: str, seed: int) -> Iterable[Any]:
    """Yields the input of each rank, in order. Inputs are small whole numbers, so that sums are exact in every element
    type.
    """
    for rank in range(job.ranks):
        yield job.random(count, dtype, seed + rank)


def fresh_seed(job: Job) -> int:
    """Returns a new random seed, the same on all ranks."""
    return int(job.world.bcast(int.from_bytes(os.urandom(6), "little")))


def differing(x: Any, expected: Any) -> int:
    """Returns the number of elements of two arrays that differ."""
    return int((x != expected).sum())


COLUMNS = (
    Column("size", "(B)", 11, "d"),
    Column("count", "(elements)", 10, "d"),
    Column("type", "", 8),
    Column("redop", "", 5),
    Column("algorithm or peer", "", 28, left=True),
    Column("calls", "/burst", 7, "d"),
    Column("MPs", "used", 5, "d"),
    Column("time", "(µs)", 9, ".2f"),
    Column("best", "(µs)", 9, ".2f"),
    Column("algbw", "(GB/s)", 8, ".2f"),
    Column("busbw", "(GB/s)", 8, ".2f"),
    Column("#wrong", "", 6, "d"),
)


@dataclass(frozen=True)
class Case:
    """A message size, with one element type.

    Attributes:
        nbytes: the size of a rank's buffer.
        count: the buffer's number of elements.
        dtype: the name of the element type.
        redop: the reduction; None for a collective that only moves bytes.
        bus_factor: the bus bandwidth divided by the algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md).
    """

    nbytes: int
    count: int
    dtype: str
    redop: str | None
    bus_factor: float


def show(job: Job, table: Table, case: Case, timings: Sequence[Timing]) -> list[Fields]:
    """Prints a row for each timing on the first rank, and returns the rows.

    On other ranks, rows have only the fields that `Job.finish` needs.
    """
    if not job.first:
        return [{"wrong": timing.wrong} for timing in timings]
    rows = []
    for timing in timings:
        algbw = case.nbytes / timing.time_us / 1e3 if timing.time_us else None
        row: Fields = {
            "size": case.nbytes,
            "count": case.count,
            "type": case.dtype,
            "redop": case.redop,
            "name": timing.name,
            "calls": timing.calls,
            "multiprocessors": timing.multiprocessors,
            "time_us": timing.time_us,
            "best_us": timing.best_us,
            "algbw_gbs": algbw,
            "busbw_gbs": algbw * case.bus_factor if algbw is not None else None,
            "wrong": timing.wrong,
        }
        shown = list(row.values())
        if timing.ours:
            shown[4] = f"ProxyCCL {timing.name}"
        table.row(*shown)
        if timing.reason:
            job.say_once(f"#   {timing.name}: {timing.reason}")
        rows.append({**row, "ours": timing.ours, "reason": timing.reason})
    return rows


def geometric_mean(values: Sequence[float]) -> float:
    """Returns the geometric mean of positive values; nan for an empty sequence."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan
