"""Compares how fast the engine and a bare loop drain a ring, in one process: python ring.py

It measures:

- The drain rate. One CPU thread produces triggers. The consumer is alternately a proxy worker and the bare loop, a C
  loop that only takes triggers out of an equal ring (`bare_loops.drain`). The engine decodes, checks, executes and
  counts each trigger. A put of 0 bytes shows the cost of this work alone. For a signal or a flush, the engine also
  calls the transport and the runtime to store 8 bytes. For a put of 8 bytes, the engine also copies the bytes.
- The rate at which kernels push, by the layout of the producing threads and the size of the ring. The consumer is again
  the engine or the bare loop.
- The round trip of push and sync, and its lower bound. To measure the bound, a kernel stores a trigger without memory
  ordering and polls the word with which the bare loop answers.
- Idling: the time to wake an idle worker, and the CPU time that an idle worker uses.

A short run determines the number of triggers of a timed run, because some kinds of triggers are a hundred times slower
than others.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

import bare_loops

from proxyccl.channels.segment.control import ControlSegment, create_segment
from proxyccl.device.arrays.array import Array
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.errors import ArgumentError, CompileError, ProxyCCLError, WaitTimeoutError
from proxyccl.device.kernel import Module
from proxyccl.device.runtime import Runtime
from proxyccl.device.runtimes import open_runtime
from proxyccl.proxy.interface import ProxyFailure
from proxyccl.proxy.observe.publications import Description
from proxyccl.proxy.ring import Fifo
from proxyccl.proxy.service import ProxyService
from proxyccl.proxy.thread import IdlePolicy
from proxyccl.proxy.trigger import Operation, Trigger
from proxyccl.tools import options
from proxyccl.tools.results import Fields, machine, versions, write_json
from proxyccl.tools.tables import Column, Table

_TIMEOUT = 30.0  # time-out of each wait, in seconds
_PUT_BYTES = 8

BARE = "bare loop"
_KINDS = {
    "put of 0 bytes": (Operation.DATA, 0),
    "signal": (Operation.SIGNAL, 0),
    "flush": (Operation.FLUSH, 0),
    "put of 8 bytes": (Operation.DATA, _PUT_BYTES),
    "put of 8 bytes + signal": (Operation.DATA | Operation.SIGNAL, _PUT_BYTES),
}

_LAYOUTS = {
    "1 thread": (1, 1),
    "1 warp": (1, 32),
    "1 block of 128": (1, 128),
    "8 blocks of 32": (8, 32),
    "8 blocks of 256": (8, 256),
    "64 blocks of 1": (64, 1),
    "512 blocks of 1": (512, 1),
}
_GPU_FIFO_SIZES = (256, 8192)  # Sizes of rings that are measured in addition to the requested size.
_MOST_HOST_BLOCKS = 64  # Each block is a thread of the CPU.

_SOURCE = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;

extern "C" __global__ void push(Fifo ring, ProxycclTrigger trigger, ProxycclControl* control, int count) {
  for (int i = 0; i < count; ++i)
    if (ring.push(trigger, control) == kNoTicket) return;
}

extern "C" __global__ void push_and_sync(Fifo ring, ProxycclTrigger trigger, ProxycclControl* control, uint64_t* ns,
                                         int count) {
  for (int i = 0; i < count; ++i) {
    const uint64_t start = nanoseconds();
    if (!ring.sync(ring.push(trigger, control), control)) return;
    ns[i] = nanoseconds() - start;
  }
}

// The lower bound of push and sync: one unordered store, and loads until the answer is there.
extern "C" __global__ void bare_round_trips(Fifo ring, ProxycclTrigger trigger, ProxycclControl* control, uint64_t* ns,
                                            int count) {
  const uint64_t mask = (1ull << ring.size_log2) - 1;
  for (int i = 0; i < count; ++i) {
    const uint64_t ticket = i, parity = ~(ticket >> ring.size_log2) & 1;
    const WaitFor what = {PROXYCCL_WAIT_RING_SYNC, PROXYCCL_NO_PEER, 0, ticket + 1};
    const uint64_t start = nanoseconds();
    storePacket128(&ring.slots[ticket & mask].word0, trigger.word0,
                   trigger.word1 | parity << PROXYCCL_PARITY_SHIFT);
    if (!waitUntil(control, what, [&](uint64_t* seen) { return (*seen = loadRelaxedSystem(ring.tail)) > ticket; }))
      return;
    ns[i] = nanoseconds() - start;
  }
}
"""
_ROUND_TRIPS = 500  # Number of round trips in a launch; the first tenth is a warm-up.
_CALIBRATION = 2000  # Number of triggers in a calibration run.
_MOST_TRIGGERS = 400_000  # Maximum number of triggers that a CPU thread pushes in a timed run.
_MOST_PUSHES = 50_000_000  # Maximum number of triggers that a kernel pushes in a timed run.


class Loopback:
    """A proxy with one channel whose destination is this rank's memory, so that no second rank is needed.

    Args:
        runtime: provides the ring and the copies.
        fifo_size: slots in the ring, a power of two.
        idle: the policy of an idle worker.
        description: describes the rank to observers; None hides the proxy from observers.
    """

    def __init__(
        self,
        runtime: Runtime,
        fifo_size: int,
        idle: IdlePolicy | None = None,
        description: Description | None = None,
    ) -> None:
        self.runtime = runtime
        self.segment = create_segment(runtime, 0, _TIMEOUT)
        self._failures: list[ProxyFailure] = []
        self._service = ProxyService(
            runtime,
            self.segment.host_pointer,
            self.segment.memory,
            shared_offset=ControlSegment.service_offset,
            fifo_size=fifo_size,
            idle=idle,
            on_failure=self._failures.append,
            description=description,
        )
        connection = self._service.connect_copy()
        self._channel = self._service.reserve_channel(connection)
        self._service.set_channel(self._channel, connection, self.segment.semaphore_host(self._channel))
        self._buffer = runtime.allocate(2 * _PUT_BYTES)
        self._memory = self._service.add_memory(self._buffer.ptr, self._buffer.nbytes)
        self.fifo = self._service.fifo_for(self._channel)

    def __enter__(self) -> Loopback:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._service.close()
        self._buffer.close()
        self.segment.close()

    @property
    def taken(self) -> int:
        """The number of triggers that the worker has taken out of the ring."""
        return self.fifo.taken

    def trigger(self, operation: Operation, size: int) -> tuple[int, int]:
        """Returns the words of a trigger that puts from the memory's first half to the second half."""
        return Trigger(operation, self._channel, size, self._memory, 0, self._memory, _PUT_BYTES).encode()

    def check(self) -> None:
        """Raises an error if the worker ended with an error."""
        if self._failures:
            raise ProxyCCLError(f"the proxy failed: {self._failures[0].reason}")


def as_parameter(trigger: tuple[int, int]) -> bytes:
    """Returns a trigger as the bytes of a ProxycclTrigger, a kernel's parameter."""
    return struct.pack("=QQ", *trigger)


def _produce(fifo: Fifo, first: int, trigger: tuple[int, int], count: int) -> float:
    tail = fifo.tail
    start = time.perf_counter()
    pushed = bare_loops.produce(fifo, first, trigger, count, _TIMEOUT)
    while tail[0] < first + count:
        if pushed < count or time.perf_counter() - start > _TIMEOUT:
            raise WaitTimeoutError(f"only {tail[0] - first} of {count} triggers were taken within {_TIMEOUT:g} s")
    return time.perf_counter() - start


@contextlib.contextmanager
def _bare_drain(runtime: Runtime, fifo_size: int, count: int) -> Iterator[Fifo]:
    fifo = Fifo(runtime, fifo_size)
    consumer = threading.Thread(target=bare_loops.drain, args=(fifo, count, _TIMEOUT), name="bare-drain")
    consumer.start()
    try:
        yield fifo
    finally:
        consumer.join()
        fifo.close()


def _bare_rate(runtime: Runtime, fifo_size: int, trigger: tuple[int, int], count: int) -> float:
    with _bare_drain(runtime, fifo_size, 2 * count) as fifo:
        _produce(fifo, 0, trigger, count)
        return count / _produce(fifo, count, trigger, count)


def _engine_rate(proxy: Loopback, trigger: tuple[int, int], count: int) -> float:
    _produce(proxy.fifo, proxy.taken, trigger, count)
    seconds = _produce(proxy.fifo, proxy.taken, trigger, count)
    proxy.check()
    return count / seconds


def _rates(rate: Callable[[int], float], repeats: int, seconds: float, triggers: int | None, most: int) -> list[float]:
    """Returns the results of `repeats` calls of rate(count). The count is `triggers`; if `triggers` is None, it is a
    count for which all calls together take about `seconds`.
    """
    rate(_CALIBRATION)  # the first launch also loads the kernel
    count = triggers or max(_CALIBRATION, min(most, int(rate(_CALIBRATION) * seconds / repeats)))
    return [rate(count) for _ in range(repeats)]


def _summary(values: list[float]) -> Fields:
    return {"median_per_s": statistics.median(values), "best_per_s": max(values)}


def drain_rates(
    runtime: Runtime, repeats: int, fifo_size: int, seconds: float, triggers: int | None = None
) -> list[Fields]:
    """Measures the rates of the bare loop and of the engine for each kind of trigger.

    Args:
        runtime: provides the ring and the driver.
        repeats: the number of timed runs of each.
        fifo_size: slots in the ring.
        seconds: about the time to spend.
        triggers: the number of triggers in each timed run; None for as many as fit in `seconds`.
    """
    each = seconds / (2 * (1 + len(_KINDS)))  # the first half of each run is a warm-up
    with Loopback(runtime, fifo_size) as proxy:
        kinds = {name: proxy.trigger(*kind) for name, kind in _KINDS.items()}
        counts: dict[str, int] = {}
        rates: dict[str, list[float]] = {name: [] for name in (BARE, *_KINDS)}

        def rate(name: str, count: int) -> float:
            if name == BARE:
                return _bare_rate(runtime, fifo_size, next(iter(kinds.values())), count)
            return _engine_rate(proxy, kinds[name], count)

        for name in rates:
            affordable = int(rate(name, _CALIBRATION) * each / repeats)
            counts[name] = triggers or max(_CALIBRATION, min(_MOST_TRIGGERS, affordable))
        for _ in range(repeats):  # kinds alternate, so that other load affects all kinds equally
            for name, values in rates.items():
                values.append(rate(name, counts[name]))
    bare = statistics.median(rates[BARE])
    return [
        {"trigger": name, **_summary(values), "over_bare": statistics.median(values) / bare, "triggers": counts[name]}
        for name, values in rates.items()
    ]


def _kernels(runtime: Runtime) -> Module:
    return runtime.compile(_SOURCE)


class _Pushes:
    """Measures kernels that push to rings of one size.

    Args:
        kernels: the compiled kernels of `_SOURCE`.
        proxy: provides the triggers, the control block and the worker.
        fifo_size: slots in the ring.
        shape: the number of blocks, and of threads in a block.
    """

    def __init__(self, kernels: Module, proxy: Loopback, fifo_size: int, shape: tuple[int, int]) -> None:
        self._kernel, self._proxy, self._fifo_size, self._shape = kernels["push"], proxy, fifo_size, shape
        self._trigger = as_parameter(proxy.trigger(Operation.DATA, 0))
        self._producers = shape[0] * shape[1]

    def _each(self, count: int) -> int:
        return max(1, count // self._producers)

    def _timed(self, fifo: Fifo, end: int, each: int) -> float:
        tail = fifo.tail
        control = self._proxy.segment.device_pointer
        launch = self._kernel.prepare(*self._shape, fifo.device_handle, self._trigger, control, each)
        start = time.perf_counter()
        launch()
        self._proxy.runtime.synchronize()
        while tail[0] < end:
            self._proxy.check()
            if time.perf_counter() - start > _TIMEOUT:
                raise WaitTimeoutError(f"{end - tail[0]} triggers were not taken out of the ring within {_TIMEOUT:g} s")
        return each * self._producers / (time.perf_counter() - start)

    def engine(self, count: int) -> float:
        each = self._each(count)
        return self._timed(self._proxy.fifo, self._proxy.taken + each * self._producers, each)

    def bare(self, count: int) -> float:
        each = self._each(count)
        total = each * self._producers
        with _bare_drain(self._proxy.runtime, self._fifo_size, total) as fifo:
            return self._timed(fifo, total, each)


def kernel_rates(
    runtime: Runtime, kernels: Module, repeats: int, fifo_size: int, seconds: float, triggers: int | None = None
) -> list[Fields]:
    """Measures how many triggers per second kernels push, by ring size, layout of the producers, and consumer. On a
    GPU, rings of several other sizes are also measured. The arguments are the same as for `drain_rates`.
    """
    gpu = runtime.name != "host"
    sizes = sorted({fifo_size, *(_GPU_FIFO_SIZES if gpu else ())})
    layouts = {name: shape for name, shape in _LAYOUTS.items() if gpu or shape[0] <= _MOST_HOST_BLOCKS}
    each = seconds / (2 * len(sizes) * len(layouts))
    results = []
    for size in sizes:
        with Loopback(runtime, size) as proxy:
            for name, shape in layouts.items():
                pushes = _Pushes(kernels, proxy, size, shape)
                engine = _rates(pushes.engine, repeats, each, triggers, _MOST_PUSHES)
                bare = _rates(pushes.bare, repeats, each, triggers, _MOST_PUSHES)
                results.append(
                    {
                        "fifo_size": size,
                        "producers": name,
                        "blocks": shape[0],
                        "threads": shape[1],
                        **_summary(engine),
                        "bare": _summary(bare),
                    }
                )
    return results


def round_trip(runtime: Runtime, kernels: Module, repeats: int, fifo_size: int) -> Fields:
    """Measures, in a kernel of one thread, the time in ns from a push until its sync returns, and the bare loop's
    round-trip time.
    """
    times: dict[str, list[int]] = {"engine": [], BARE: []}
    out = Array(runtime, runtime.allocate(8 * _ROUND_TRIPS), (_ROUND_TRIPS,), as_dtype("int64"))
    with Loopback(runtime, fifo_size) as proxy:
        trigger = as_parameter(proxy.trigger(Operation.DATA, 0))

        def run(name: str, consumer: str, fifo: Fifo) -> None:
            out.fill(0)
            kernels[name](1, 1, fifo.device_handle, trigger, proxy.segment.device_pointer, out, _ROUND_TRIPS)
            runtime.synchronize()
            proxy.check()
            measured = out.numpy()
            if not measured.all():
                raise WaitTimeoutError(f"{consumer}: a round trip through the ring got no answer in time")
            times[consumer] += measured[_ROUND_TRIPS // 10 :].tolist()

        for _ in range(repeats):
            run("push_and_sync", "engine", proxy.fifo)
            with _bare_drain(runtime, fifo_size, _ROUND_TRIPS) as fifo:
                run("bare_round_trips", BARE, fifo)
    out.free()
    engine, bare = (
        {"median_ns": statistics.median(values), "best_ns": min(values), "mean_ns": statistics.fmean(values)}
        for values in times.values()
    )
    return {**engine, "bare": bare, "over_bare": engine["median_ns"] / bare["median_ns"]}


def idling(runtime: Runtime, policy: IdlePolicy, pauses: int, fifo_size: int) -> Fields:
    """Measures an idle worker's CPU seconds per second, and the time from a push until the worker stores the tail. A
    CPU thread pushes after pauses of 1 ms and of 20 ms.
    """
    results: Fields = {"policy": asdict(policy)}
    with Loopback(runtime, fifo_size, policy) as proxy:
        trigger = proxy.trigger(Operation.DATA, 0)
        for pause_ms in (1, 20):
            times = []
            for _ in range(pauses):
                time.sleep(pause_ms / 1e3)
                times.append(_produce(proxy.fifo, proxy.taken, trigger, 1))
            results[f"wake_after_{pause_ms}_ms"] = {
                "median_us": statistics.median(times) * 1e6,
                "worst_us": max(times) * 1e6,
            }
        time.sleep(0.05)
        cpu, start = time.process_time(), time.perf_counter()
        time.sleep(0.02 * pauses)
        results["cpu"] = (time.process_time() - cpu) / (time.perf_counter() - start)
    return results


def _show_drain(results: list[Fields]) -> None:
    print("Drain rate with one producing CPU thread")
    table = Table(
        (
            Column("consumer: trigger", "", 32, left=True),
            Column("median", "(M/s)", 8, ".1f"),
            Column("best", "(M/s)", 8, ".1f"),
            Column("of bare", "", 8, ".2f"),
        )
    )
    table.header()
    for row in results:
        name = row["trigger"] if row["trigger"] == BARE else f"engine: {row['trigger']}"
        table.row(name, row["median_per_s"] / 1e6, row["best_per_s"] / 1e6, row["over_bare"])


def _show_kernels(results: list[Fields], trip: Fields) -> None:
    print("\nKernels that push, by layout of the producers (put of 0 bytes)")
    table = Table(
        (
            Column("slots", "", 6, "d"),
            Column("producers", "", 24, left=True),
            Column("engine", "(M/s)", 8, ".1f"),
            Column("best", "(M/s)", 8, ".1f"),
            Column("bare", "(M/s)", 8, ".1f"),
            Column("best", "(M/s)", 8, ".1f"),
        )
    )
    table.header()
    for row in results:
        rates = (row["median_per_s"], row["best_per_s"], row["bare"]["median_per_s"], row["bare"]["best_per_s"])
        table.row(row["fifo_size"], row["producers"], *(rate / 1e6 for rate in rates))
    for name, times in (("push + sync", trip), ("the bare round trip", trip["bare"])):
        median, best, mean = (times[key] / 1e3 for key in ("median_ns", "best_ns", "mean_ns"))
        print(f"{name}, 1 thread: median {median:.2f} µs, best {best:.2f} µs, mean {mean:.2f} µs")
    print(f"push + sync over the bare round trip: {trip['over_bare']:.2f}")


def _show_idling(results: Fields) -> None:
    policy = results["policy"]
    print(
        f"\nIdle worker: spins {policy['spin_us']:g} µs, yields {policy['yield_us']:g} µs, "
        f"then sleeps up to {policy['max_sleep_us']:g} µs"
    )
    for pause in (1, 20):
        wake = results[f"wake_after_{pause}_ms"]
        print(f"wake-up after {pause} ms: median {wake['median_us']:.0f} µs, worst {wake['worst_us']:.0f} µs")
    print(f"CPU use: {100 * results['cpu']:.1f} % of a core")


def run(seconds: float, repeats: int, fifo_size: int, json: Path | None, triggers: int | None) -> None:
    """Measures everything, prints the tables, and, unless `json` is None, writes the results to the file `json`."""
    runtime = open_runtime()
    facts = machine()
    results: Fields = {
        "benchmark": "ring",
        "runtime": runtime.name,
        "device": runtime.describe(),
        "fifo_size": fifo_size,
        "repeats": repeats,
    }
    print(f"# ProxyCCL {versions().get('proxyccl', '')} ring of {fifo_size} slots, {runtime.name} runtime")
    if runtime.name != "host":
        print(f"# {runtime.describe()}")
    print(f"# {facts['cpu']}, {facts['cores']} cores, load {facts['load']}")
    print(f"# medians of {repeats}\n")

    results["drain"] = drain_rates(runtime, repeats, fifo_size, 0.3 * seconds, triggers)
    _show_drain(results["drain"])

    try:
        kernels = _kernels(runtime)
    except CompileError as error:
        results["kernels"], results["kernels_missing"] = None, str(error)
        print(f"\nKernels were not measured: {error}", file=sys.stderr)
    else:
        results["kernels"] = kernel_rates(runtime, kernels, repeats, fifo_size, 0.6 * seconds, triggers)
        results["round_trip"] = round_trip(runtime, kernels, repeats, fifo_size)
        _show_kernels(results["kernels"], results["round_trip"])

    results["idle"] = idling(runtime, IdlePolicy(), 5 * repeats, fifo_size)
    _show_idling(results["idle"])
    if json is not None:
        write_json(json, results)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-t", "--seconds", type=options.count, default=20, help="time to spend (default %(default)s)")
    parser.add_argument(
        "-n", "--triggers", type=options.count, help="triggers in each timed run (default: what the time allows)"
    )
    parser.add_argument(
        "-r", "--repeats", type=options.count, default=7, help="repeats of each timed run (default %(default)s)"
    )
    parser.add_argument(
        "--fifo-size", type=options.count, default=1024, help="slots, a power of two (default %(default)s)"
    )
    parser.add_argument("--json", type=options.json_file, metavar="FILE", help="write the results to FILE")
    parsed = parser.parse_args()
    try:
        run(parsed.seconds, parsed.repeats, parsed.fifo_size, parsed.json, parsed.triggers)
    except ArgumentError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
