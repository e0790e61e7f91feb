"""Ours and its peers in one process group: joins the ranks, then checks and times calls that take turns.

The programs beside it say what is called; nothing here knows which collective it is.

Time is that of the GPU. A contender's calls are captured into a CUDA graph, whose replay is timed by events and
divided by the number of calls, so that no launch cost of Python is in it. Before the first event each rank's stream
sleeps until the replay is queued too, and the ranks meet in a barrier: none of them starts late because its CPU did.
Contenders alternate; the figure is the median over repeats of the maximum over ranks.
"""

from __future__ import annotations

import argparse
import faulthandler
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

# NVLink multicast must not be used: said before torch and NCCL are loaded, which read it.
os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1")

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from mpi4py import MPI
from program import common_arguments, describe, end_if_it_hangs, heading

from proxyccl import ArgumentError, Communicator
from proxyccl.channels.tools import options
from proxyccl.channels.tools.report import Column, Report, Table, write_json

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_TIMEOUT = 20.0  # seconds, of each wait
_SLEEP_CYCLES = 600_000  # about 300 µs: longer than it takes to queue a barrier and a replay
_MOST_CALLS = 50
_REPLAY_US = 3000.0
_POISON = 0xA5


def arguments(description: str, default_sizes: Sequence[int], quick_sizes: Sequence[int]) -> argparse.ArgumentParser:
    """The options of programs that measure a collective by size."""
    parser = common_arguments(description)
    parser.add_argument("-s", "--sizes", type=options.size, nargs="+", metavar="SIZE", help="bytes, such as 64K")
    parser.add_argument("-d", "--dtypes", nargs="+", choices=list(DTYPES), help="element types")
    parser.add_argument("-a", "--algorithms", nargs="+", metavar="NAME", help="ours; auto is the library's choice")
    parser.add_argument("-r", "--repeats", type=options.count, help="of each timed replay")
    parser.set_defaults(default_sizes=tuple(default_sizes), quick_sizes=tuple(quick_sizes))
    return parser


def resolve(parsed: argparse.Namespace) -> argparse.Namespace:
    """Fills in what was not given to the options of `arguments`, by `--quick`."""
    parsed.sizes = parsed.sizes or (parsed.quick_sizes if parsed.quick else parsed.default_sizes)
    parsed.dtypes = parsed.dtypes or (["float32"] if parsed.quick else ["float32", "bfloat16"])
    parsed.repeats = parsed.repeats or (5 if parsed.quick else 15)
    return parsed


@dataclass(frozen=True)
class Contender:
    """One way to make the call.

    Attributes:
        name: an algorithm's, or a peer's.
        ours: whether it is ProxyCCL's.
        call: queues the call on torch's current stream.
        refill: queues what puts fresh inputs in place, and poison where outputs go.
        wrong: the wrong elements after that many calls since `refill`.
        also_wrong: makes another check of its own, not timed, and returns the wrong elements.
    """

    name: str
    ours: bool
    call: Callable[[], object]
    refill: Callable[[], object]
    wrong: Callable[[int], int]
    also_wrong: Callable[[], int] = lambda: 0


@dataclass(frozen=True)
class Timing:
    """What was found. `time_us` is None, and `reason` says why, for a contender that can't make the call."""

    name: str
    ours: bool
    time_us: float | None
    best_us: float | None
    calls: int
    wrong: int
    reason: str = ""


class Job:
    """The ranks: MPI started them, and torch.distributed's NCCL and a Communicator join them.

    Args:
        seconds: to spend; `in_time` tells when they are over, and a job that hangs is ended some time after.
        growth_limit: no more calls in a graph than leave world_size ** calls below 10 to this power.
    """

    def __init__(self, seconds: float, *, growth_limit: float = 36.0) -> None:
        end_if_it_hangs(seconds)
        self._start, self._seconds = time.monotonic(), seconds
        self.world = MPI.COMM_WORLD
        self.rank, self.ranks = self.world.Get_rank(), self.world.Get_size()
        host = self.world.Split_type(MPI.COMM_TYPE_SHARED)
        self.device = torch.device("cuda", host.Get_rank())
        host.Free()
        torch.cuda.set_device(self.device)
        port = None
        if self.rank == 0:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
        dist.init_process_group(
            "nccl",
            init_method=f"tcp://127.0.0.1:{self.world.bcast(port)}",
            rank=self.rank,
            world_size=self.ranks,
            device_id=self.device,
            timeout=timedelta(seconds=60),
        )
        self.group_name: str = dist.group.WORLD.group_name
        self.comm = Communicator.from_mpi(timeout=_TIMEOUT)
        self.stream = torch.cuda.Stream()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        growth = growth_limit / math.log10(self.ranks) if self.ranks > 1 else _MOST_CALLS
        self._most_calls = min(_MOST_CALLS, int(growth))

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.comm.__exit__(kind, error, trace)
        if error is None:
            dist.destroy_process_group()
            faulthandler.cancel_dump_traceback_later()

    @property
    def first(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

    def in_time(self) -> bool:
        """Whether there is time for more; the same on all ranks."""
        return bool(self.world.bcast(time.monotonic() - self._start < self._seconds))

    def describe(self) -> Report:
        """What a report says of the GPUs and the peers."""
        return {
            **describe(self.comm),
            "peers": {
                "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
                "torch": torch.__version__,
                "CUDA of torch": torch.version.cuda,
            },
        }

    def heading(self, title: str, *notes: str) -> None:
        """Prints what is measured, and on what."""
        peers = ", ".join(f"{name} {version}" for name, version in self.describe()["peers"].items())
        heading(self.comm, title, f"peers: {peers}; no multicast", *notes)

    def write(self, path: Path | None, report: Report) -> None:
        """Writes the report, with what `describe` says, on the first rank."""
        if self.first and path is not None:
            write_json(path, {**self.describe(), **report})

    def finish(self, parsed: argparse.Namespace, rows: list[Report], skipped: list[str], report: Report) -> int:
        """Ends the table and writes the report, on the first rank. Returns the exit code: 1 if a result was wrong."""
        wrong = sum(row["wrong"] for row in rows)
        if self.first:
            if skipped:
                print(f"# not measured, as the {parsed.seconds} s were over: {', '.join(skipped)}")
            print(f"# out of bounds values: {wrong} {'OK' if wrong == 0 else 'FAILED'}")
            self.write(parsed.json, {**report, "results": rows, "not_measured": skipped})
        return 1 if wrong else 0

    def everywhere(self, reason: str) -> str:
        """The first rank's reason that is not empty."""
        return next((each for each in self.world.allgather(reason) if each), "")

    def _first_call(self, contender: Contender) -> tuple[int, str]:
        """Wrong elements of the first call, or why it can't be made."""
        reason, wrong = "", 0
        # Only what is said of the arguments before anything starts; any other error ends the run.
        refusal = ArgumentError if contender.ours else RuntimeError
        try:
            contender.refill()
            contender.call()
            self.stream.synchronize()
        except refusal as error:
            reason = str(error).splitlines()[0]
        reason = self.everywhere(reason)
        if not reason:
            wrong = contender.wrong(1) + contender.also_wrong()
        return wrong, reason

    def _calls_for(self, contender: Contender) -> int:
        """How many calls to time together, by what a few take; the same on all ranks."""
        start, end = self._events
        contender.refill()
        start.record()
        for _ in range(3):
            contender.call()
        end.record()
        end.synchronize()
        slowest = self.world.allreduce(start.elapsed_time(end) * 1e3 / 3, MPI.MAX)
        return max(1, min(self._most_calls, int(_REPLAY_US / slowest)))

    def _capture(self, contender: Contender, calls: int) -> Any:
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog thread asks for events meanwhile, which only a thread's own capture mode allows.
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(calls):
            contender.call()
        graph.capture_end()
        return graph

    def _replay(self, contender: Contender, graph: Any, calls: int) -> float:
        """Microseconds a call."""
        start, end = self._events
        contender.refill()
        torch.cuda._sleep(_SLEEP_CYCLES)
        self.comm.barrier(stream=self.stream.cuda_stream)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / calls

    def measure(self, contenders: Sequence[Contender], repeats: int) -> list[Timing]:
        """Checks and times the contenders in turns. All ranks call this together, and all get the same."""
        wrong, reasons, graphs = [0] * len(contenders), [""] * len(contenders), {}
        times = np.full((len(contenders), repeats), np.nan)
        torch.cuda.synchronize()  # the inputs were made on another stream
        with torch.cuda.stream(self.stream):
            for i, contender in enumerate(contenders):
                wrong[i], reasons[i] = self._first_call(contender)
                if reasons[i]:
                    continue
                calls = self._calls_for(contender)
                contender.refill()
                self.stream.synchronize()
                graph = self._capture(contender, calls)
                graph.replay()  # the first replay also warms up
                self.stream.synchronize()
                wrong[i] += contender.wrong(calls)
                graphs[i] = (graph, calls)
            for repeat in range(repeats):
                for i, (graph, calls) in graphs.items():
                    times[i, repeat] = self._replay(contenders[i], graph, calls)
        slowest = np.empty_like(times)
        self.world.Allreduce(times, slowest, MPI.MAX)
        all_wrong = self.world.allreduce(np.array(wrong), MPI.SUM)
        for graph, _ in graphs.values():
            graph.reset()
        return [
            Timing(
                contender.name,
                contender.ours,
                statistics.median(slowest[i].tolist()) if i in graphs else None,
                float(slowest[i].min()) if i in graphs else None,
                graphs[i][1] if i in graphs else 0,
                int(all_wrong[i]),
                reasons[i],
            )
            for i, contender in enumerate(contenders)
        ]


def symmetric_memory(job: Job, count: int, dtype: torch.dtype) -> tuple[torch.Tensor | None, str]:
    """A tensor that all ranks reach, or None and why torch can't make one here. All ranks get the same answer."""
    reason, tensor = "", None
    try:
        tensor = symm_mem.empty(count, dtype=dtype, device=job.device)
        symm_mem.rendezvous(tensor, job.group_name)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    reason = job.everywhere(reason)
    return (None if reason else tensor), reason


def random_inputs(job: Job, count: int, dtype: torch.dtype, seed: int) -> Iterable[torch.Tensor]:
    """Each rank's input, by rank: small whole numbers, whose sums every element type holds exactly."""
    for rank in range(job.ranks):
        generator = torch.Generator(job.device).manual_seed(seed + rank)
        yield torch.randint(-8, 9, (count,), generator=generator, device=job.device, dtype=torch.int8).to(dtype)


def fresh_seed(job: Job) -> int:
    """A seed that no run had before; the same on all ranks."""
    return int(job.world.bcast(int.from_bytes(os.urandom(6), "little")))


def poison(x: torch.Tensor) -> None:
    """Fills a tensor with what no result is."""
    x.view(torch.uint8).fill_(_POISON)


def differing(x: torch.Tensor, expected: torch.Tensor) -> int:
    """Elements that differ."""
    return int(torch.count_nonzero(x != expected))


COLUMNS = (
    Column("size", "(B)", 11, "d"),
    Column("count", "(elements)", 10, "d"),
    Column("type", "", 8),
    Column("redop", "", 5),
    Column("algorithm or peer", "", 24, left=True),
    Column("calls", "/replay", 7, "d"),
    Column("time", "(µs)", 9, ".2f"),
    Column("best", "(µs)", 9, ".2f"),
    Column("algbw", "(GB/s)", 8, ".2f"),
    Column("busbw", "(GB/s)", 8, ".2f"),
    Column("#wrong", "", 6, "d"),
)


@dataclass(frozen=True)
class Case:
    """One size of one element type.

    Attributes:
        nbytes, count: of a rank's buffer.
        dtype: by name.
        redop: the reduction, or None.
        bus_factor: bus bandwidth over algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md).
    """

    nbytes: int
    count: int
    dtype: str
    redop: str | None
    bus_factor: float


def show(job: Job, table: Table, case: Case, timings: Sequence[Timing]) -> list[Report]:
    """Prints a row for each timing, on the first rank. Returns the rows; elsewhere, what `Job.finish` needs of them."""
    if not job.first:
        return [{"wrong": timing.wrong} for timing in timings]
    rows = []
    for timing in timings:
        algbw = case.nbytes / timing.time_us / 1e3 if timing.time_us else None
        row: Report = {
            "size": case.nbytes,
            "count": case.count,
            "type": case.dtype,
            "redop": case.redop,
            "name": timing.name,
            "calls": timing.calls,
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
            print(f"#   {timing.name}: {timing.reason}")
        rows.append({**row, "ours": timing.ours, "reason": timing.reason})
    return rows


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive values; nan of none."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan
