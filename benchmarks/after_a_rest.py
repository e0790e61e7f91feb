"""One call after a rest, by kernels, by proxy and by NCCL: mpiexec -n 2 python -m mpi4py after_a_rest.py

A call is an all_reduce of 1 KiB. All ranks wait for each other in a barrier, rest, and make one call. A replay launches
a graph that contains only this call, and does not wake a sleeping proxy. A call's time is measured by two events around
it on an idle stream, so it includes the time to issue the call. Only the shortest of all ranks' times is used, because
the longer times include waiting for ranks that issued the call later. The result is the median over calls. The time of
the issuing thread is measured on the first rank.

The calls are measured with proxies in threads, in a process of the job, and in the node daemon, each with every idle
policy. The share of a core is the CPU time per second of the busiest thread of the first rank's proxy while the program
sleeps. Replays and NCCL need torch.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from daemon import quiet_barrier
from mpi4py import MPI
from program import common_arguments, describe, end_if_it_hangs, heading

from proxyccl import Communicator
from proxyccl.device.errors import RuntimeUnavailableError
from proxyccl.proxy.daemon.connection import daemon_process
from proxyccl.proxy.daemon.protocol import socket_path
from proxyccl.proxy.observe.publications import find
from proxyccl.proxy.observe.reader import Observer
from proxyccl.proxy.thread import IdlePolicy
from proxyccl.tools.results import Fields, write_json
from proxyccl.tools.tables import Column, Table

_TIMEOUT = 20.0
_COUNT = 256  # number of elements, of 4 bytes each
_RESTS_MS = (0, 1, 10, 100)
_CALLS = {0: 40, 1: 40, 10: 30, 100: 12}
_QUICK_CALLS = 3
_SETTLED_SECONDS = 0.3  # idle seconds after the last call
_IDLE_SECONDS = 1.5
_POLICIES: dict[str, IdlePolicy | None] = {
    "default": None,
    "few cores": IdlePolicy(),
    "cores to spare": IdlePolicy.where_cores_suffice(),
    "always awake": IdlePolicy.always_awake(),
    "spins": IdlePolicy(spin_us=500_000),
}
_COLUMNS = (
    Column("by", "", 10, left=True),
    Column("issued", "", 7, left=True),
    Column("place", "", 8, left=True),
    Column("idle policy", "", 15, left=True),
    *(Column("after", f"{rest} ms", 8, ".1f") for rest in _RESTS_MS),
    Column("issue", "(µs)", 7, ".1f"),
    Column("share", "of a core", 9, ".3f"),
)

Timed = Callable[[], tuple[float, float]]
"""Makes a call; returns the time between the call's events and the issuing thread's time, in µs."""


def after_rests(call: Timed, calls: dict[int, int]) -> Fields:
    """Makes calls after idle times of each length. Returns the median times in µs."""
    world = MPI.COMM_WORLD
    fields: Fields = {}
    for _ in range(5):
        call()
    issues = []
    for rest, count in calls.items():
        times = []
        for _ in range(count):
            world.Barrier()
            time.sleep(rest / 1e3)
            took, issue = call()
            times.append(world.allreduce(took, MPI.MIN))
            issues.append(issue)
        fields[f"after_{rest}_ms"] = statistics.median(times)
    return {**fields, "issue_us": statistics.median(issues)}


def timed_on(comm: Communicator, stream: Any, issue: Callable[[], object]) -> Timed:
    """Returns a function that makes a call on a stream, and times the call by the runtime's events."""
    begin, end = comm.runtime.create_event(), comm.runtime.create_event()

    def call() -> tuple[float, float]:
        begin.record(stream)
        start = time.perf_counter()
        issue()
        issued = time.perf_counter() - start
        end.record(stream)
        stream.synchronize()
        return 1e3 * end.elapsed(begin), 1e6 * issued

    return call


def share_of_a_core(comm: Communicator) -> float | None:
    """Returns the share of a core that this rank's idle proxy takes, or None if the share is unknown."""
    ((_, publication),) = find(comm.job, [comm.rank])
    quiet_barrier()
    time.sleep(_SETTLED_SECONDS)
    with Observer(publication) as observer:
        before, start = observer.snapshot().workers, time.perf_counter()
        time.sleep(_IDLE_SECONDS)
        after, seconds = observer.snapshot().workers, time.perf_counter() - start
    shares = [
        (new.cpu_ns - old.cpu_ns) / 1e9 / seconds
        for old, new in zip(before, after, strict=True)
        if new.cpu_ns is not None and old.cpu_ns is not None
    ]
    return max(shares, default=None)


def places() -> list[str]:
    """Returns the places where proxies can run; "daemon" is among them if all ranks find a node daemon."""
    try:
        daemon_process(socket_path())
        found = True
    except RuntimeUnavailableError:
        found = False
    return ["thread", "process", *(["daemon"] if MPI.COMM_WORLD.allreduce(found, MPI.LAND) else [])]


@contextmanager
def torch_of(comm: Communicator) -> Iterator[Any]:
    """Yields torch with a process group of NCCL, or None if the runtime is not CUDA or torch is missing."""
    if comm.runtime.name != "cuda" or importlib.util.find_spec("torch") is None:
        yield None
        return
    import torch

    world = MPI.COMM_WORLD
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ["MASTER_PORT"] = str(world.bcast(29600 + os.getpid() % 1000))
    device = torch.device("cuda", comm.runtime.device)
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", rank=comm.rank, world_size=comm.world_size, device_id=device)
    yield torch
    torch.distributed.destroy_process_group()


def replayed(torch: Any, comm: Communicator, issue: Callable[[Any], object]) -> Timed:
    """Captures one call in a graph. Returns a function that replays the graph and times the replay."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        issue(stream.cuda_stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        issue(stream.cuda_stream)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def call() -> tuple[float, float]:
        with torch.cuda.stream(stream):
            begin.record()
            start = time.perf_counter()
            graph.replay()
            issued = time.perf_counter() - start
            end.record()
            stream.synchronize()
        return 1e3 * begin.elapsed_time(end), 1e6 * issued

    comm.check()
    return call


def of_communicator(torch: Any, place: str, idle: IdlePolicy | None, calls: dict[int, int], by: str) -> list[Fields]:
    """Measures a communicator's all_reduce. Returns a row for single calls and, with torch, a row for graph replays."""
    algorithm = "proxy" if by == "proxy" else None
    with Communicator.from_mpi(timeout=_TIMEOUT, proxy=place, idle=idle) as comm:
        array, stream = comm.empty(_COUNT, "float32").fill(0), comm.runtime.create_stream()
        comm.register(array)

        def issue(on: Any) -> None:
            comm.all_reduce(array, algorithm=algorithm, stream=on)

        row = {"by": by, "place": place if by == "proxy" else ""}
        eager = after_rests(timed_on(comm, stream, lambda: issue(stream)), calls)
        rows = [{**row, "issued": "call", **eager, "share": share_of_a_core(comm) if by == "proxy" else None}]
        if torch is not None:
            rows.append({**row, "issued": "replay", **after_rests(replayed(torch, comm, issue), calls)})
        comm.check()
    return rows


def of_nccl(torch: Any, calls: dict[int, int]) -> Fields:
    """Measures NCCL's all_reduce. Returns its row."""
    x = torch.ones(_COUNT, device="cuda")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def call() -> tuple[float, float]:
        begin.record()
        start = time.perf_counter()
        torch.distributed.all_reduce(x, torch.distributed.ReduceOp.MAX)
        issued = time.perf_counter() - start
        end.record()
        torch.cuda.synchronize()
        return 1e3 * begin.elapsed_time(end), 1e6 * issued

    return {"by": "NCCL", "issued": "call", "place": "", **after_rests(call, calls)}


def main() -> int:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--policy", choices=_POLICIES, action="append", help="only these idle policies (default: all)")
    parsed = parser.parse_args()
    end_if_it_hangs(parsed.seconds)
    world = MPI.COMM_WORLD
    if world.size < 2:
        raise SystemExit("after_a_rest.py needs at least 2 ranks: mpiexec -n 2 python -m mpi4py …")
    calls = {rest: _QUICK_CALLS if parsed.quick else _CALLS[rest] for rest in _RESTS_MS}
    rows: list[Fields] = []
    table = Table(_COLUMNS)

    def show(found: list[Fields], policy: str) -> None:
        for row in found:
            rows.append({"policy": policy, **row})
            if world.rank == 0:
                times = [row[f"after_{rest}_ms"] for rest in _RESTS_MS]
                table.row(row["by"], row["issued"], row["place"], policy, *times, row["issue_us"], row.get("share"))

    with Communicator.from_mpi(timeout=_TIMEOUT) as comm, torch_of(comm) as torch:
        heading(comm, "one all_reduce of 1 KiB after a rest", "times in µs")
        facts = describe(comm)
        if world.rank == 0:
            table.header()
        show(of_communicator(torch, "thread", None, calls, "kernels"), "")
        if torch is not None:
            show([of_nccl(torch, calls)], "")
        for place in places():
            for policy in parsed.policy or _POLICIES:
                show(of_communicator(torch, place, _POLICIES[policy], calls, "proxy"), policy)
    if world.rank == 0 and parsed.json is not None:
        write_json(parsed.json, {"benchmark": "after_a_rest", **facts, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
