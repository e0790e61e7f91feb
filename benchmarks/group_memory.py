"""Device memory of communicators, and the time to give it back: mpiexec -n 2 python -m mpi4py group_memory.py

The program makes communicators of all ranks one after the other, and makes calls of some sizes on each. After each step
it reads the device's free memory (cuMemGetInfo counts all processes, also that of the proxies) and the communicator's
own account. Then it suspends and resumes the last communicator, which also has an array of `--array` MiB, and replays a
graph that was captured before. On NVIDIA GPUs, as many communicators of NCCL then make the same calls. The times are
those of the slowest rank.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

from mpi4py import MPI
from nccl_communicators import Nccl, NcclCommunicator, NcclError
from program import common_arguments, describe, end_if_it_hangs

from proxyccl import Array, Communicator, Stream
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.tools.results import Fields, write_json
from proxyccl.tools.tables import Column, Table

_MIB = 1 << 20
_SIZES = (8 << 10, 256 << 10, 1 << 20, 4 << 20, 64 << 20)


class Steps:
    """The rows of the table: memory and time of each step, on the first rank's device."""

    def __init__(self) -> None:
        self.rows: list[Fields] = []
        self._before = 0
        self._table = Table(
            (
                Column("step", "", 44, left=True),
                Column("device", "MiB", 10, ".1f"),
                Column("account", "MiB", 10, ".1f"),
                Column("time", "ms", 10, ".2f"),
            )
        )

    def begin(self, comm: Communicator) -> None:
        self._before = comm.runtime.memory_left()[0]
        if comm.rank == 0:
            self._table.header()

    def take(self, comm: Communicator, step: str, action: Callable[[], object]) -> None:
        """Makes a step, and adds a row with the decrease of the device's free memory since `begin`."""
        MPI.COMM_WORLD.Barrier()
        start = time.perf_counter()
        action()
        seconds = MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX)
        comm.runtime.synchronize()
        MPI.COMM_WORLD.Barrier()
        device = (self._before - comm.runtime.memory_left()[0]) / _MIB
        account = sum(comm.memory_usage().values()) / _MIB
        self.rows.append({"step": step, "device_mib": device, "account_mib": account, "ms": seconds * 1e3})
        if comm.rank == 0:
            self._table.row(step, device, account, seconds * 1e3)


def captured(comm: Communicator, stream: Stream, issue: Callable[[], object]) -> Callable[[], None]:
    """Returns a function that replays the work that `issue` queues; on runtimes without graphs, one that queues it."""
    if comm.runtime.name != "cuda":
        return lambda: (issue(), comm.synchronize(stream))[1]
    from cuda.bindings import driver

    def checked(result: tuple[object, ...]) -> object:
        if int(result[0]):  # type: ignore[call-overload]
            raise SystemExit(f"the driver failed: {result[0]}")
        return result[1] if len(result) > 1 else None

    handle = driver.CUstream(stream.handle)
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    checked(driver.cuStreamBeginCapture(handle, mode))
    issue()
    executable = checked(driver.cuGraphInstantiate(checked(driver.cuStreamEndCapture(handle)), 0))

    def replay() -> None:
        checked(driver.cuGraphLaunch(executable, handle))
        comm.synchronize(stream)

    return replay


def measure_nccl(steps: Steps, comm: Communicator, x: Array, sizes: Sequence[int], groups: int) -> str:
    """Measures the same all_reduces with communicators of NCCL. Returns NCCL's version; if NCCL can't run, returns why
    without measuring.
    """
    if comm.runtime.name != "cuda":
        return f"NCCL does not run on the {comm.runtime.name} runtime"
    try:
        nccl = Nccl()
    except (OSError, NcclError) as error:
        return f"without NCCL: {error}"
    stream = comm.runtime.create_stream()
    made: list[NcclCommunicator] = []

    def all_reduce(nbytes: int) -> None:
        made[-1].all_reduce(x.ptr, nbytes // 4, stream.handle)
        stream.synchronize()

    for number in range(groups):
        steps.take(comm, f"NCCL {number}: made", lambda: made.append(nccl.communicator(MPI.COMM_WORLD)))
        for nbytes in sizes:
            step = f"NCCL {number}: all_reduce of {nbytes >> 10} KiB"
            steps.take(comm, step, functools.partial(all_reduce, nbytes))
    for number in reversed(range(groups)):
        steps.take(comm, f"NCCL {number}: closed", made[number].close)
    return f"NCCL {nccl.version}"


def part_of(comm: Communicator, x: Array, count: int) -> Array:
    """Returns the first `count` elements of an array of float32."""
    return Array(comm.runtime, x.memory, (count,), as_dtype("float32"))


def main() -> None:
    parser = common_arguments(__doc__ or "")
    parser.add_argument("--array", type=int, default=1024, help="MiB of the array of `empty` (default %(default)s)")
    parser.add_argument("--groups", type=int, default=2, help="number of communicators (default %(default)s)")
    arguments = parser.parse_args()
    end_if_it_hangs(arguments.seconds)
    steps, comms = Steps(), []
    sizes = _SIZES[: 3 if arguments.quick else None]
    for number in range(arguments.groups):
        comm = Communicator.from_mpi(suspendable=number == arguments.groups - 1, timeout=60)
        comms.append(comm)
        if not number:
            steps.begin(comm)
        x = comm.empty(max(_SIZES) // 4, "float32").fill(0)
        steps.take(comm, f"group {number}: made, with an array of {max(_SIZES) // _MIB} MiB", lambda: None)
        steps.take(comm, f"group {number}: barrier", comm.barrier)
        for nbytes in sizes:
            part = part_of(comm, x, nbytes // 4)
            step = f"group {number}: all_reduce of {nbytes >> 10} KiB"
            steps.take(comm, step, functools.partial(comm.all_reduce, part))
    array = comm.empty(arguments.array * _MIB, "uint8").fill(comm.rank)
    stream = comm.runtime.create_stream()
    part = part_of(comm, x, 1024).fill(1)
    replay = captured(comm, stream, lambda: comm.all_reduce(part, "max", stream=stream))
    steps.take(comm, "graph replayed", replay)
    for save in (True, False):
        steps.take(comm, f"suspend(save={save})", functools.partial(comm.suspend, save=save))
        steps.take(comm, "resume", comm.resume)
        if save and array.numpy()[-1] != comm.rank:
            raise SystemExit("the array has lost its contents")
        part.fill(comm.rank)
        steps.take(comm, "graph replayed", replay)
        if set(part.numpy()) != {float(comm.world_size - 1)}:
            raise SystemExit(f"the replayed graph computed {part.numpy()}")
    facts = {**describe(comm), "nccl": measure_nccl(steps, comm, x, sizes, arguments.groups)}
    for number in reversed(range(len(comms))):
        steps.take(comm, f"group {number}: closed", comms[number].close)
    if comm.rank == 0 and arguments.json:
        write_json(arguments.json, {**facts, "benchmark": "group_memory", "steps": steps.rows})


if __name__ == "__main__":
    main()
