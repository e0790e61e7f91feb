"""Time to make a communicator of fewer ranks: mpiexec -n 4 python -m mpi4py benchmarks/regroup.py

Each contender makes a communicator of all ranks except the last:

- `Communicator` over MPI;
- `split`, whose result can be used only until the communicator of all ranks is closed;
- `shrink`, whose result outlives the communicator of all ranks, and which also works after ranks were lost;
- on NVIDIA GPUs NCCL's ncclCommInitRank and ncclCommShrink.

Contenders are measured while no call is running, and during an all_reduce that the last rank does not join, as if that
rank were lost. During an all_reduce, the communicator of all ranks is aborted: ours by `abort`, NCCL's by ncclCommAbort
or by ncclCommShrink's flag NCCL_SHRINK_ABORT.

Two times of the slowest rank are measured: from a barrier until the call returns, and from the barrier until the new
communicator's first all_reduce of 1 KiB is complete. The contenders are measured alternately; the table shows medians.
Results are checked.
"""

from __future__ import annotations

import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI
from nccl_communicators import Nccl, NcclError
from program import common_arguments, describe, end_if_it_hangs, heading

from proxyccl import Communicator
from proxyccl.tools.results import write_json
from proxyccl.tools.tables import Column, Table

_TURNS, _QUICK_TURNS = 20, 2
_COUNT = 256
_COLUMNS = (
    Column("made by", "", 30, left=True),
    Column("call", "(ms)", 9, ".2f"),
    Column("with all_reduce", "(ms)", 16, ".2f"),
)
WORLD = MPI.COMM_WORLD
RANK, LAST = WORLD.Get_rank(), WORLD.Get_size() - 1


class Contender(ABC):
    """Makes a communicator of fewer ranks.

    Args:
        name: the contender's name in the table.
        stuck: whether the communicator is made during an all_reduce that the last rank does not join.
    """

    def __init__(self, name: str, *, stuck: bool) -> None:
        self.name, self.stuck = name, stuck

    @abstractmethod
    def open(self, home: Communicator) -> None:
        """Makes the communicator of all ranks, and its first call.

        Args:
            home: a communicator that provides device and memory.
        """

    @abstractmethod
    def begin(self) -> None:
        """Queues an all_reduce on the communicator of all ranks."""

    @abstractmethod
    def regroup(self, part: MPI.Intracomm) -> None:
        """Makes the communicator of the ranks of `part`. Only these ranks call this method."""

    @abstractmethod
    def check(self) -> bool:
        """Makes one all_reduce with the new communicator. Returns whether the result is right."""

    @abstractmethod
    def close(self) -> None:
        """Frees everything. All ranks call this, also the last rank, which does not call `regroup`."""


class Ours(Contender):
    """A `Contender` that uses ProxyCCL. `how` takes the communicator of all ranks and an MPI communicator of the new
    ranks, and makes the new communicator.
    """

    def __init__(self, name: str, how: Callable[[Communicator, MPI.Intracomm], Communicator], *, stuck: bool) -> None:
        super().__init__(name, stuck=stuck)
        self._how = how
        self._part: Communicator | None = None

    def open(self, home: Communicator) -> None:
        """See `Contender`."""
        self._whole = Communicator()
        self._stream = self._whole.runtime.create_stream()
        self._x, self._lost = (self._whole.empty(_COUNT, "float32").fill(1) for _ in range(2))
        self._whole.all_reduce(self._x)
        self._whole.synchronize()
        self._x.fill(1)
        self._whole.synchronize()

    def begin(self) -> None:
        """See `Contender`."""
        self._whole.all_reduce(self._lost, stream=self._stream)

    def regroup(self, part: MPI.Intracomm) -> None:
        """See `Contender`."""
        if self.stuck:
            self._whole.abort("the last rank does not come")
        self._part = self._how(self._whole, part)

    def check(self) -> bool:
        """See `Contender`."""
        assert self._part is not None
        self._part.all_reduce(self._x)
        self._part.synchronize()
        return bool(np.all(self._x.numpy() == LAST))

    def close(self) -> None:
        """See `Contender`."""
        if self._part is not None:
            self._part.close()
            self._part = None
        self._whole.close()


class Ncclwise(Contender):
    """A `Contender` that uses NCCL: with `shrink` it calls ncclCommShrink, otherwise it makes a new communicator."""

    def __init__(self, name: str, nccl: Nccl, *, shrink: bool, stuck: bool) -> None:
        super().__init__(name, stuck=stuck)
        self._nccl, self._shrink = nccl, shrink
        self._part: Any = None

    def open(self, home: Communicator) -> None:
        """See `Contender`."""
        self._stream = home.runtime.create_stream()
        self._x, self._lost = (home.empty(_COUNT, "float32").fill(1) for _ in range(2))
        home.synchronize()
        self._whole: Any = self._nccl.communicator(WORLD)
        self._whole.all_reduce(self._x.ptr, _COUNT, self._stream.handle)
        self._stream.synchronize()
        self._x.fill(1)
        home.synchronize()

    def begin(self) -> None:
        """See `Contender`."""
        self._whole.all_reduce(self._lost.ptr, _COUNT, self._stream.handle)

    def regroup(self, part: MPI.Intracomm) -> None:
        """See `Contender`."""
        if self._shrink:
            self._part = self._whole.shrink([LAST], abort=self.stuck)
            return
        if self.stuck:
            self._whole.abort()
            self._whole = None
        self._part = self._nccl.communicator(part)

    def check(self) -> bool:
        """See `Contender`."""
        self._part.all_reduce(self._x.ptr, _COUNT, self._stream.handle)
        self._stream.synchronize()
        return bool(np.all(self._x.numpy() == LAST))

    def close(self) -> None:
        """See `Contender`."""
        if self._part is not None:
            self._part.close()
            self._part = None
        if self._whole is not None:
            if self.stuck:
                self._whole.abort()
            else:
                self._whole.close()


def contenders(runtime: str) -> tuple[list[Contender], str]:
    """Returns all contenders, and a text with NCCL's version or the reason why NCCL is missing."""
    members = list(range(LAST))
    ways: dict[str, Callable[[Communicator, MPI.Intracomm], Communicator]] = {
        "Communicator": lambda _, part: Communicator(part),
        "split": lambda whole, _: whole.split(members),
        "shrink": lambda whole, _: whole.shrink(exclude=[LAST]),
    }
    found: list[Contender] = [Ours(name, how, stuck=False) for name, how in ways.items()]
    found += [Ours(f"abort, {name}", ways[name], stuck=True) for name in ("Communicator", "shrink")]
    if runtime != "cuda":
        return found, f"NCCL does not run on the {runtime} runtime"
    try:
        nccl = Nccl()
    except (OSError, NcclError) as error:
        return found, f"without NCCL: {error}"
    found += [
        Ncclwise("ncclCommInitRank", nccl, shrink=False, stuck=False),
        Ncclwise("ncclCommShrink", nccl, shrink=True, stuck=False),
        Ncclwise("ncclCommAbort, InitRank", nccl, shrink=False, stuck=True),
        Ncclwise("ncclCommShrink, SHRINK_ABORT", nccl, shrink=True, stuck=True),
    ]
    return found, f"NCCL {nccl.version}"


def measure(contender: Contender, home: Communicator, part: MPI.Intracomm, wrong: list[str]) -> tuple[float, float]:
    """Measures the two times of a contender, in ms."""
    times = [0.0, 0.0]
    contender.open(home)
    WORLD.Barrier()
    if RANK != LAST:
        if contender.stuck:
            contender.begin()
            part.Barrier()
        began = time.perf_counter()
        contender.regroup(part)
        times[0] = time.perf_counter() - began
        if not contender.check():
            wrong.append(contender.name)
        times[1] = time.perf_counter() - began
    WORLD.Barrier()
    contender.close()
    return WORLD.allreduce(times[0], MPI.MAX) * 1e3, WORLD.allreduce(times[1], MPI.MAX) * 1e3


def main() -> int:
    parsed = common_arguments(__doc__.splitlines()[0]).parse_args()
    end_if_it_hangs(parsed.seconds)
    part = WORLD.Split(int(RANK == LAST))
    deadline = time.monotonic() + parsed.seconds
    with Communicator() as comm:
        ways, nccl = contenders(comm.runtime.name)
        times: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
        wrong: list[str] = []
        heading(comm, "communicators of fewer ranks", "median; slowest rank", nccl)
        for _ in range(_QUICK_TURNS if parsed.quick else _TURNS):
            for way in ways:
                times[way.name].append(measure(way, comm, part, wrong))
            if WORLD.bcast(time.monotonic() > deadline):
                break
        failed = WORLD.allreduce(len(wrong))
        if comm.rank == 0:
            table, rows = Table(_COLUMNS), []
            table.header()
            for name, each in times.items():
                call, first = (statistics.median(column) for column in zip(*each, strict=True))
                table.row(name, call, first)
                rows.append({"made_by": name, "turns": len(each), "call_ms": call, "with_all_reduce_ms": first})
            print(f"# wrong results: {failed}")
            if parsed.json:
                write_json(
                    parsed.json, {"benchmark": "regroup", **describe(comm), "nccl": nccl, "wrong": failed, "rows": rows}
                )
    part.Free()
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
