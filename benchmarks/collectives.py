"""Prints a table like nccl-tests, with MPI's times: mpiexec -n 4 python -m mpi4py collectives.py all_reduce

The program also checks the results, with new random inputs and poisoned outputs. Calls of ProxyCCL and MPI alternate,
each after a barrier. ProxyCCL and MPI use the same buffers, except that on a GPU MPI's buffers are in host memory. A
time is the median over iterations of the slowest rank's time. If calls are slow, the program times fewer calls than
requested, so as not to exceed its time limit.

The formulas are from nccl-tests' doc/PERFORMANCE.md. The algorithm bandwidth is size / time. The bus bandwidth, which
can be compared with the links' speed, is the algorithm bandwidth times a factor, for n ranks 2 (n - 1) / n for
all_reduce; (n - 1) / n for all_gather, reduce_scatter and all_to_all; 1 for broadcast. The size is the number of bytes
of one rank's input or output, whichever is larger.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxyccl.channels.collectives.selection import ALGORITHMS_BY_COLLECTIVE
from proxyccl.channels.collectives.table import OPS
from proxyccl.channels.communicator import Communicator
from proxyccl.device.arrays.array import Array
from proxyccl.device.arrays.dtypes import DTYPES, as_dtype, reduction_dtypes
from proxyccl.device.errors import ArgumentError
from proxyccl.tools import options
from proxyccl.tools.results import Fields, machine, versions, write_json
from proxyccl.tools.tables import Column, Table

Data = NDArray[Any]

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
REDUCTIONS = frozenset({"all_reduce", "reduce_scatter"})
_MPI_OPS = {"sum": "SUM", "prod": "PROD", "min": "MIN", "max": "MAX"}
_MPI_DTYPES = frozenset({"float32", "float64", "int32", "int64"})
_POISON = 0xA5
_LEAST_ITERATIONS = 3

_COLUMNS = (
    Column("size", "(B)", 11, "d"),
    Column("count", "(elements)", 10, "d"),
    Column("type", "", 8),
    Column("redop", "", 5),
    Column("algorithm", "", 18, left=True),
    Column("#iter", "", 5, "d"),
    Column("time", "(µs)", 9, ".1f"),
    Column("algbw", "(GB/s)", 8, ".4f"),
    Column("busbw", "(GB/s)", 8, ".4f"),
    Column("#wrong", "", 6, "d"),
    Column("MPI time", "(µs)", 9, ".1f"),
    Column("MPI/ours", "", 8, ".2f"),
)


def algorithms_of(collective: str, algorithm: str) -> tuple[str | None, ...]:
    """Returns the algorithms to measure, in order: the named algorithm, None for "auto", or all algorithms for "each".

    Raises:
        ArgumentError: the collective has no algorithm of that name.
    """
    known = ALGORITHMS_BY_COLLECTIVE[collective]
    if algorithm == "auto":
        return (None,)
    if algorithm == "each":
        return (None, *known)
    if algorithm not in known:
        raise ArgumentError(
            "--algorithm", f"unknown {algorithm!r} for {collective}; expected one of auto, each, {', '.join(known)}"
        )
    return (algorithm,)


def sizes_of(parsed: argparse.Namespace) -> list[int]:
    """Returns the message size in bytes for each row of the table."""
    sizes, size = [], parsed.min_bytes
    while size <= parsed.max_bytes:
        sizes.append(size)
        size *= parsed.step_factor
    return sizes


def bus_factor(collective: str, ranks: int) -> float:
    """Returns the bus bandwidth divided by the algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md)."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if collective == "broadcast":
        return 1.0
    return (ranks - 1) / ranks


def _random(rng: np.random.Generator, count: int, dtype: np.dtype[Any], op: str) -> Data:
    if op == "prod":
        return rng.choice(np.array([-1, 1, 2]), count, p=[0.45, 0.45, 0.1]).astype(dtype)
    return rng.integers(-8, 9, count).astype(dtype)


class Case:
    """A call of a collective whose result every rank checks."""

    def __init__(self, communicator: Communicator, mpi: Any, parsed: argparse.Namespace, size: int, seed: int) -> None:
        self._comm = communicator
        self._mpi = mpi
        self._parsed = parsed
        self._element = as_dtype(parsed.dtype)
        self.dtype = self._element.numpy()
        ranks = communicator.world_size
        # The count is rounded down to a multiple of the number of ranks, but is at least one element per rank.
        self.count = max(ranks, size // self._element.itemsize // ranks * ranks)
        self.nbytes = self.count * self._element.itemsize
        share = self.count // ranks
        send, receive = {"all_gather": (share, self.count), "reduce_scatter": (self.count, share)}.get(
            parsed.collective, (self.count, self.count)
        )
        op = parsed.op if parsed.collective in REDUCTIONS else "sum"
        inputs = [_random(np.random.default_rng((seed, rank)), send, self.dtype, op) for rank in range(ranks)]
        self._input = inputs[communicator.rank]
        self.output = np.empty(receive, self.dtype)
        self.expected = self._reference(inputs, share)
        self._on_device: tuple[Array, Array] | None = None
        if communicator.runtime.name != "host":
            x, out = (communicator.empty(n, parsed.dtype) for n in (send, receive))
            self._on_device = x.upload(self._input), out

    def _reference(self, inputs: list[Data], share: int) -> Data:
        rank, collective = self._comm.rank, self._parsed.collective
        mine = slice(rank * share, (rank + 1) * share)
        if collective == "broadcast":
            return inputs[0]
        if collective == "all_gather":
            return np.concatenate(inputs)
        if collective == "all_to_all":
            return np.concatenate([x[mine] for x in inputs])
        reduced = self._reduce([x.astype(np.float64) for x in inputs]).astype(self.dtype)
        return reduced if collective == "all_reduce" else reduced[mine]

    def _reduce(self, inputs: list[Data]) -> Data:
        op = self._parsed.op
        ufunc = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[op]
        reduced: Data = ufunc.reduce(inputs)
        if op != "avg":
            return reduced
        mean: Data = reduced / len(inputs)
        return np.trunc(mean) if np.issubdtype(self.dtype, np.integer) else mean

    def run(self, algorithm: str | None) -> None:
        comm, op = self._comm, self._parsed.op
        x, out = self._on_device or (self._input, self.output)
        match self._parsed.collective:
            case "all_reduce":
                comm.all_reduce(x, op, out=out, algorithm=algorithm)
            case "all_gather":
                comm.all_gather(x, out=out, algorithm=algorithm)
            case "reduce_scatter":
                comm.reduce_scatter(x, op, out=out, algorithm=algorithm)
            case "all_to_all":
                comm.all_to_all(x, out=out, algorithm=algorithm)
            case "broadcast":
                comm.broadcast(x, 0, out=out, algorithm=algorithm)
        if self._on_device is not None:
            comm.synchronize()

    def mpi_call(self) -> Callable[[], None] | None:
        comm, send, receive = self._mpi.COMM_WORLD, self._input, self.output
        collective = self._parsed.collective
        if self._element.name not in _MPI_DTYPES:
            return None
        if collective in REDUCTIONS:
            if self._parsed.op not in _MPI_OPS:
                return None
            op = getattr(self._mpi, _MPI_OPS[self._parsed.op])
            if collective == "all_reduce":
                return lambda: comm.Allreduce(send, receive, op=op)
            return lambda: comm.Reduce_scatter_block(send, receive, op=op)
        if collective == "all_gather":
            return lambda: comm.Allgather(send, receive)
        if collective == "all_to_all":
            return lambda: comm.Alltoall(send, receive)
        return lambda: comm.Bcast(send if self._comm.rank == 0 else receive, root=0)

    def poison(self) -> None:
        self.output.view(np.uint8).fill(_POISON)
        if self._on_device is not None:
            self._on_device[1].upload(self.output)

    def wrong(self) -> int:
        """Returns the number of wrong elements in the output. A mean may differ in the last bit because of rounding."""
        output = self.output if self._on_device is None else self._on_device[1].numpy()
        if self._parsed.op == "avg" and self._parsed.collective in REDUCTIONS:
            got, expected = output.astype(np.float64), self.expected.astype(np.float64)
            tolerance = 0.0 if np.issubdtype(self.dtype, np.integer) else 2.0 ** -(4 * self._element.itemsize - 1)
            close: Data = np.abs(got - expected) <= tolerance * np.abs(expected)
            return int(np.count_nonzero(~close))
        return int(np.count_nonzero(output != self.expected))


def _timed(communicator: Communicator, call: Callable[[], None]) -> float:
    communicator.barrier()
    communicator.synchronize()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _affordable(communicator: Communicator, parsed: argparse.Namespace, warm_up_seconds: float, seconds: float) -> int:
    if parsed.warm_up == 0:
        return parsed.iterations
    slowest = max(
        float(np.frombuffer(data)[0]) for data in communicator.all_gather_bytes(np.array([warm_up_seconds]).tobytes())
    )
    affordable = int(seconds * parsed.warm_up / max(slowest, 1e-9))
    return min(parsed.iterations, max(_LEAST_ITERATIONS, affordable))


def _measure(
    communicator: Communicator, case: Case, algorithm: str | None, parsed: argparse.Namespace, seconds: float
) -> Fields:
    mpi_call = case.mpi_call()
    case.poison()
    case.run(algorithm)
    wrong = case.wrong()
    start = time.perf_counter()
    for _ in range(parsed.warm_up):
        case.run(algorithm)
        if mpi_call is not None:
            mpi_call()
    iterations = _affordable(communicator, parsed, time.perf_counter() - start, seconds)
    times = np.zeros((2, iterations))
    for i in range(iterations):
        times[0, i] = _timed(communicator, lambda: case.run(algorithm))
        if mpi_call is not None:
            times[1, i] = _timed(communicator, mpi_call)
    case.poison()
    case.run(algorithm)
    wrong += case.wrong()

    own = times.tobytes() + np.int64(wrong).tobytes()
    everyone = communicator.all_gather_bytes(own)
    slowest = np.max([np.frombuffer(data[:-8]).reshape(times.shape) for data in everyone], axis=0)
    call_seconds, mpi_seconds = (statistics.median(row.tolist()) for row in slowest)
    algbw = case.nbytes / call_seconds / 1e9
    return {
        "size": case.nbytes,
        "count": case.count,
        "type": parsed.dtype,
        "redop": parsed.op if parsed.collective in REDUCTIONS else None,
        "algorithm": algorithm or "auto",
        "iterations": iterations,
        "time_us": call_seconds * 1e6,
        "algbw_gbs": algbw,
        "busbw_gbs": algbw * bus_factor(parsed.collective, communicator.world_size),
        "wrong": sum(int(np.frombuffer(data[-8:], np.int64)[0]) for data in everyone),
        "mpi_time_us": mpi_seconds * 1e6 if mpi_call is not None else None,
        "mpi_over_ours": mpi_seconds / call_seconds if mpi_call is not None else None,
    }


def run(parsed: argparse.Namespace) -> int:
    """Measures the collective; every rank of the MPI job calls this. Returns the exit code: 1 if a result was wrong.

    Raises:
        ArgumentError: the collective does not have the algorithm.
    """
    algorithms = algorithms_of(parsed.collective, parsed.algorithm)
    sizes = sizes_of(parsed)
    from mpi4py import MPI

    with Communicator.from_mpi() as communicator:
        first = communicator.rank == 0
        if parsed.algorithm == "each":
            usable = communicator.collectives.algorithms(parsed.collective)
            algorithms = tuple(name for name in algorithms if name is None or name in usable)
        seed = int.from_bytes(communicator.all_gather_bytes(os.urandom(8))[0], "little")
        mpi_version = " ".join(MPI.Get_library_version().strip("\0").split("\n")[0].split())
        seconds = parsed.seconds / (len(sizes) * len(algorithms))
        table = Table(_COLUMNS)
        if first:
            facts = machine()
            print(f"# ProxyCCL {versions().get('proxyccl', '')} {parsed.collective}: {communicator.world_size} ranks")
            print(
                f"# {communicator.runtime.name} runtime on {facts['cpu']}, {facts['cores']} cores, load {facts['load']}"
            )
            print(f"# {mpi_version}")
            print(f"# median of #iter calls after {parsed.warm_up} to warm up; maximum over ranks\n#")
            table.header()
        rows = []
        for size in sizes:
            case = Case(communicator, MPI, parsed, size, seed + size)
            for algorithm in algorithms:
                row = _measure(communicator, case, algorithm, parsed, seconds)
                rows.append(row)
                if first:
                    table.row(*row.values())
        wrong = sum(row["wrong"] for row in rows)
        if first:
            print(f"# out of bounds values: {wrong} {'OK' if wrong == 0 else 'FAILED'}")
            if parsed.json is not None:
                results = {
                    "benchmark": parsed.collective,
                    "world_size": communicator.world_size,
                    "runtime": communicator.runtime.name,
                    "mpi": mpi_version,
                    "warm_up": parsed.warm_up,
                    "results": rows,
                }
                write_json(parsed.json, results)
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("collective", choices=COLLECTIVES)
    sizes = {"type": options.size, "metavar": "SIZE"}
    parser.add_argument("-b", "--min-bytes", **sizes, default=1 << 10, help="first size (default 1K)")
    parser.add_argument("-e", "--max-bytes", **sizes, default=1 << 20, help="last size (default 1M)")
    parser.add_argument(
        "-f", "--step-factor", type=options.whole(2), default=4, help="factor between sizes (default %(default)s)"
    )
    parser.add_argument(
        "-d", "--dtype", choices=list(DTYPES), default="float32", help="element type (default %(default)s)"
    )
    parser.add_argument("-o", "--op", choices=OPS, default="sum", help="reduction (default %(default)s)")
    parser.add_argument(
        "-a", "--algorithm", default="auto", help="an algorithm, auto, or each for all (default %(default)s)"
    )
    parser.add_argument(
        "-n", "--iterations", type=options.count, default=20, help="most timed calls of a size (default %(default)s)"
    )
    parser.add_argument(
        "-w", "--warm-up", type=options.whole(0), default=2, help="calls before those (default %(default)s)"
    )
    parser.add_argument("-t", "--seconds", type=options.count, default=8, help="time to spend (default %(default)s)")
    parser.add_argument("--json", type=options.json_file, metavar="FILE", help="write the results to FILE")
    parsed = parser.parse_args()
    if parsed.min_bytes > parsed.max_bytes:
        parser.error(f"--min-bytes {parsed.min_bytes} is larger than --max-bytes {parsed.max_bytes}")
    if parsed.collective in REDUCTIONS and parsed.dtype not in reduction_dtypes():
        parser.error(f"--dtype: {parsed.dtype} can't be reduced; expected one of {', '.join(reduction_dtypes())}")
    try:
        return run(parsed)
    except ArgumentError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
