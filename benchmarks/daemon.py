"""The node daemon compared with proxies in the ranks: mpiexec -n 4 python -m mpi4py daemon.py

The program starts a daemon. Several times, the program opens a communicator whose proxies are in the daemon, and one
whose proxies are in the ranks.

- Latency is half of a ping-pong's round trip between the first two ranks. Each rank runs a kernel of one thread, which
  times each round. On the host runtime each kernel and each proxy needs a core. A second measurement of latency needs
  only two cores: a CPU thread pushes a put and its signal, and polls the peer's semaphore word.
- A rate is the number of triggers per second through one ring, from the first push until the proxy has taken the last
  trigger. Triggers are pushed by a kernel of one warp or by a CPU thread.
- CPU time is the CPU time of the threads that run proxies, or of the whole daemon. CPU time is measured while all ranks
  are idle, and while each rank pushes a few 8-byte puts with signals in each millisecond.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aims
import bare_loops
from mpi4py import MPI
from program import common_arguments, describe, end_if_it_hangs, heading

from proxyccl import Communicator, Operation, ProxyChannel, RegisteredMemory, Trigger
from proxyccl.proxy._engine import ffi
from proxyccl.proxy.daemon.connection import missing_in_daemon
from proxyccl.proxy.processes import stat_of
from proxyccl.tools.results import Fields, write_json
from proxyccl.tools.tables import Column, Table

_TIMEOUT = 20.0  # seconds
_ROUNDS = 300
_KERNEL_PUSHES = 200_000
_CPU_PUSHES = 1_000_000
_CPU_ROUNDS = 2000
_CPU_LATENCY = "put + signal of the CPU"
_BURST = 16  # pushes of each rank per millisecond
_WHERE = ("thread", "daemon")

_SOURCE = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;

extern "C" __global__ void ping_pong(DeviceHandle<ProxyChannel> channel, uint64_t bytes, int first, int rounds,
                                     uint64_t* ns) {
  for (int round = 0; round < rounds; ++round) {
    const uint64_t start = nanoseconds();
    for (int turn = 0; turn < 2; ++turn) {
      if (turn == first) {
        if (!channel.wait()) return;
      } else if (bytes == 0) {
        channel.signal();
      } else {
        channel.putWithSignal(0, 0, bytes);
      }
    }
    ns[round] = nanoseconds() - start;
  }
}

extern "C" __global__ void push(DeviceHandle<ProxyChannel> channel, int count, uint64_t* ns) {
  const uint64_t start = nanoseconds();
  for (int i = 0; i < count; ++i) channel.put(0, 0, 0);
  __syncthreads();
  if (threadIdx.x == 0 && channel.flush()) ns[0] = nanoseconds() - start;
}
"""


def quiet_barrier() -> None:
    """Waits for all ranks in a barrier, without spinning."""
    request = MPI.COMM_WORLD.Ibarrier()
    while not request.Test():
        time.sleep(0.002)


class Pusher:
    """Pushes triggers onto a channel's ring from the calling thread. Once an object of this class exists, no kernel may
    push onto that ring.

    Args:
        comm: the communicator whose proxy drains the ring.
        channel: the channel whose ring is used.
        memory: source and destination of the puts.
    """

    def __init__(self, comm: Communicator, channel: ProxyChannel, memory: RegisteredMemory) -> None:
        self._fifo = comm.proxy.fifo_for(channel.id)
        self._channel = channel.id
        self._memories = memory.source_id(channel.peer), memory.peer_id(channel.peer)
        self._pushed = comm.proxy.counters(channel.id).triggers  # includes triggers that a kernel pushed

    def push(self, operation: Operation, nbytes: int, count: int) -> None:
        """Pushes `count` puts of `nbytes` bytes each. Waits for room in the ring."""
        src, dst = self._memories
        trigger = Trigger(operation, self._channel, nbytes, src, 0, dst, 0)
        if bare_loops.produce(self._fifo, self._pushed, trigger.encode(), count, _TIMEOUT) != count:
            raise SystemExit(f"daemon.py: the proxy did not take the triggers within {_TIMEOUT:g} s")
        self._pushed += count

    def arrival(self, semaphore: int) -> float:
        """Returns the microseconds from the push of a put of 8 bytes with its signal until the peer's semaphore counts
        it.
        """
        word = ffi.cast("uint64_t *", semaphore)
        before, start = word[0], time.perf_counter_ns()
        self.push(Operation.DATA | Operation.SIGNAL, 8, 1)
        while word[0] == before:
            pass
        return (time.perf_counter_ns() - start) / 1e3

    def wait(self) -> None:
        """Waits until the proxy has taken all triggers."""
        tail = self._fifo.tail
        while tail[0] < self._pushed:
            pass


def latencies(comm: Communicator, channel: ProxyChannel, kernels: Any) -> dict[str, list[float]]:
    """Measures ping-pongs. Returns, for each kind of message, the one-way times in µs of all rounds after the warm-up
    rounds.
    """
    found = {}
    ns = comm.empty(_ROUNDS, "int64")
    for name, nbytes in (("signal", 0), ("put of 8 bytes + signal", 8), ("put of 1 KiB + signal", 1024)):
        kernels["ping_pong"](1, 1, channel, nbytes, comm.rank, _ROUNDS, ns)
        comm.synchronize()
        found[name] = (ns.numpy()[_ROUNDS // 10 :] / 2e3).tolist()
    return found


def rates(
    comm: Communicator, channel: ProxyChannel, memory: RegisteredMemory, kernels: Any
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Measures the rate of triggers per second, and the latencies of pushes by the CPU. Returns an empty result on the
    second rank. The CPU pushes last, because kernels don't know which slots of the ring the CPU has filled.
    """
    if comm.rank:
        return {}, {}
    ns = comm.empty(1, "int64")
    kernel = []
    for _ in range(3):
        kernels["push"](1, 32, channel, _KERNEL_PUSHES // 32, ns)
        comm.synchronize()
        kernel.append(_KERNEL_PUSHES / float(ns.numpy()[0]) * 1e9)
    pusher = Pusher(comm, channel, memory)
    arrivals = [pusher.arrival(comm.group.links.semaphore(channel.peer, channel.id)) for _ in range(_CPU_ROUNDS)]
    cpu = []
    for _ in range(3):
        start = time.perf_counter()
        pusher.push(Operation.DATA, 0, _CPU_PUSHES)
        pusher.wait()
        cpu.append(_CPU_PUSHES / (time.perf_counter() - start))
    return {"pushed by a kernel": kernel, "pushed by a CPU thread": cpu}, {_CPU_LATENCY: arrivals}


def of_two(where: str) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Measures latencies and rates between the first two ranks, while the other ranks wait."""
    pair = MPI.COMM_WORLD.Split(int(MPI.COMM_WORLD.rank >= 2))
    found: Any = ({}, {})
    if MPI.COMM_WORLD.rank < 2:
        with Communicator.from_mpi(pair, timeout=_TIMEOUT, proxy=where) as comm:
            memory = comm.register(comm.empty(1 << 16, "uint8"))
            channels = comm.proxy_channels(memory)
            kernels = comm.compile(_SOURCE)
            comm.all_gather_bytes(b"")
            latency = latencies(comm, channels[0], kernels)
            rate, arrivals = rates(comm, channels[0], memory, kernels)
            found = {**latency, **arrivals}, rate
            comm.all_gather_bytes(b"")
    quiet_barrier()
    pair.Free()
    return found


def _cpu_of(stat: Path) -> float:
    fields = stat_of(stat)
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def proxy_seconds(daemon: int) -> float:
    """Returns the CPU time in seconds of this process's proxy threads, plus, on the first rank, the daemon's CPU
    time.
    """
    own = [thread.native_id for thread in threading.enumerate() if "-proxy-" in thread.name]
    seconds = sum(_cpu_of(Path(f"/proc/self/task/{number}/stat")) for number in own)
    return seconds + (_cpu_of(Path(f"/proc/{daemon}/stat")) if MPI.COMM_WORLD.rank == 0 else 0.0)


def of_node(where: str, daemon: int, seconds: float) -> dict[str, float]:
    """Measures how many cores the proxies of all ranks use while they are idle and while they are busy."""
    with Communicator.from_mpi(timeout=_TIMEOUT, proxy=where) as comm:
        memory = comm.register(comm.empty(1 << 16, "uint8"))
        channel = comm.proxy_channels(memory).to((comm.rank + 1) % comm.world_size)
        pusher = Pusher(comm, channel, memory)

        def measure(load: Callable[[], None]) -> float:
            quiet_barrier()
            before, start = proxy_seconds(daemon), time.perf_counter()
            while time.perf_counter() - start < seconds:
                load()
            took = time.perf_counter() - start
            cores = (proxy_seconds(daemon) - before) / took
            return float(MPI.COMM_WORLD.allreduce(cores))

        def burst() -> None:
            pusher.push(Operation.DATA | Operation.SIGNAL, 8, _BURST)
            time.sleep(0.001)

        time.sleep(0.2)
        idle = measure(lambda: time.sleep(0.05))
        before = comm.proxy.counters(channel.id).triggers
        busy = measure(burst)
        pusher.wait()
        mine = (comm.proxy.counters(channel.id).triggers - before) / seconds
        return {"idle": idle, "busy": busy, "triggers_per_s": float(MPI.COMM_WORLD.allreduce(mine))}


def start_daemon(path: Path, threads: int) -> subprocess.Popen[bytes]:
    """Starts a daemon and waits until it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "proxyccl", "daemon", "--socket", str(path), "--threads", str(threads)],
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while missing_in_daemon(_TIMEOUT)[0]:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("daemon.py: the daemon ended or did not answer within 60 s")
        time.sleep(0.05)
    return process


def compared(rows: dict[str, dict[str, list[float]]], *, higher_is_better: bool) -> list[Fields]:
    """Returns the medians with proxies in the daemon and in the ranks, and the ratio of the daemon's median to the
    ranks' median.
    """
    found = []
    for name, values in rows.items():
        thread, daemon = (statistics.median(values[where]) for where in _WHERE)
        found.append({"what": name, "thread": thread, "daemon": daemon, "ratio": daemon / thread})
        found[-1]["aim"] = aims.DAEMON_RATE_RATIO if higher_is_better else aims.DAEMON_LATENCY_RATIO
    return found


def show(title: str, unit: str, rows: list[Fields], scale: float, digits: str) -> None:
    """Prints one table."""
    print(f"\n{title}")
    table = Table(
        (
            Column("", "", 28, left=True),
            Column("in ranks", unit, 10, digits),
            Column("daemon", unit, 10, digits),
            Column("ratio", "", 8, ".2f"),
        )
    )
    table.header()
    for row in rows:
        table.row(row["what"], row["thread"] * scale, row["daemon"] * scale, row["ratio"])


def main() -> int:
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1, help="threads of the daemon (default 1)")
    parsed = parser.parse_args()
    end_if_it_hangs(parsed.seconds)
    world = MPI.COMM_WORLD
    if world.size < 2:
        raise SystemExit("daemon.py needs at least 2 ranks: mpiexec -n 4 python -m mpi4py …")
    directory = Path(world.bcast(tempfile.mkdtemp(prefix="proxyccl-") if world.rank == 0 else None))
    os.environ["PROXYCCL_DAEMON_SOCKET"] = str(directory / "socket")
    process = start_daemon(directory / "socket", parsed.threads) if world.rank == 0 else None
    daemon = world.bcast(process.pid if process else None)
    try:
        with Communicator.from_mpi(timeout=_TIMEOUT) as comm:
            heading(comm, "node daemon beside proxies in the ranks")
            facts = describe(comm)
        latency: dict[str, dict[str, list[float]]] = {}
        rate: dict[str, dict[str, list[float]]] = {}
        node: dict[str, dict[str, list[float]]] = {}
        for repeat in range(2 if parsed.quick else 5):
            for where in _WHERE if repeat % 2 == 0 else reversed(_WHERE):
                for into, found in zip((latency, rate), of_two(where), strict=True):
                    for name, values in found.items():
                        into.setdefault(name, {}).setdefault(where, []).extend(values)
                for name, value in of_node(where, daemon, 0.5 if parsed.quick else 2.0).items():
                    node.setdefault(name, {}).setdefault(where, []).append(value)
        if world.rank == 0:
            results = {
                "benchmark": "daemon",
                **facts,
                "threads": parsed.threads,
                "latency_us": compared(latency, higher_is_better=False),
                "triggers_per_s": compared(rate, higher_is_better=True),
                "cores": {
                    name: {where: statistics.median(values[where]) for where in _WHERE} for name, values in node.items()
                },
            }
            show("Latency, one way", "(µs)", results["latency_us"], 1, ".2f")
            show("Rate of one ring", "(M/s)", results["triggers_per_s"], 1e-6, ".2f")
            cores = results["cores"]
            print(f"\nCores that the proxies of {world.size} ranks use: in the ranks, in the daemon")
            for name in ("idle", "busy"):
                print(f"{name}: {cores[name]['thread']:.3f}, {cores[name]['daemon']:.3f}")
            moved = cores["triggers_per_s"]
            print(f"(busy: {moved['thread']:.0f} and {moved['daemon']:.0f} puts with signals a second)")
            if parsed.json is not None:
                write_json(parsed.json, results)
    finally:
        if process is not None:
            process.terminate()
            process.wait(60)
            for left in directory.iterdir():
                left.unlink()
            directory.rmdir()
    return 0


if __name__ == "__main__":
    sys.exit(main())
