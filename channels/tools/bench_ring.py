"""`proxyccl bench ring`: how fast the engine drains a ring, beside a bare loop that only drains; in one process.

Four things are measured:

- The drain rate. One CPU thread produces; either a real proxy worker drains, or a C loop that takes the triggers out
  and does nothing with them (`proxyccl_bare_drain`), over a ring of the same size and kind. They alternate. The
  engine decodes each trigger, checks it against its tables, executes and counts it. A put of 0 bytes is the engine's
  own work and nothing else; a signal and a flush add a call into the transport and the runtime with a store of 8
  bytes; a put of 8 bytes adds a copy.
- The rate at which kernels push, by the layout of the producing threads and the size of the ring; the engine drains,
  or the bare loop.
- The round trip of push and sync, beside the least that it can be: a kernel that does nothing but store a trigger,
  with no ordering, and poll the word that the bare loop answers with.
- Idling: what it costs to wake a worker that found nothing to do, and the CPU time that such a worker uses.

How many triggers a timed run takes is chosen by what a short one took: a driver's call for each signal makes some
kinds a hundred times slower than others.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from proxyccl.channels.control import ControlSegment, create_segment
from proxyccl.channels.tools.report import Column, Report, Table, machine, versions, write_json
from proxyccl.device import open_runtime
from proxyccl.device.arrays import Array
from proxyccl.device.dtypes import as_dtype
from proxyccl.device.errors import CompileError, ProxyCCLError, WaitTimeoutError
from proxyccl.device.kernel import Module
from proxyccl.device.runtime import Runtime
from proxyccl.proxy import _engine
from proxyccl.proxy.fifo import Fifo
from proxyccl.proxy.interface import ProxyFailure
from proxyccl.proxy.observe.publications import Description
from proxyccl.proxy.service import ProxyService
from proxyccl.proxy.thread import IdlePolicy
from proxyccl.proxy.trigger import Operation, Trigger

ffi, lib = _engine.ffi, _engine.lib

_TIMEOUT = 30.0  # seconds, of each wait
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
_GPU_FIFO_SIZES = (256, 8192)  # beside the one asked for
_MOST_HOST_BLOCKS = 64  # each is a thread of the CPU

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

// What no push and sync can be faster than: one unordered store, and loads until the answer is there.
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
_ROUND_TRIPS = 500  # in a launch; the first tenth warms up
_CALIBRATION = 2000  # triggers
_MOST_TRIGGERS = 400_000  # that a CPU thread produces in a timed run
_MOST_PUSHES = 50_000_000  # that a kernel makes


class Loopback:
    """A proxy whose one channel leads back to its own memory: no second rank takes part.

    Args:
        runtime: whose rings and copies are used.
        fifo_size: slots in the ring, a power of two.
        idle: what the worker does when there is nothing to do.
        description: by which observers know the proxy; without one they don't find it.
    """

    def __init__(
        self,
        runtime: Runtime,
        fifo_size: int,
        idle: IdlePolicy | None = None,
        description: Description | None = None,
    ) -> None:
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
        self._tail = ffi.cast("uint64_t *", self.fifo.tail_host)

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
        """Triggers that the worker has taken out of the ring so far; the next one's ticket when it is empty."""
        return int(self._tail[0])

    def trigger(self, operation: Operation, size: int) -> Any:
        """A trigger on the channel, from the memory's first half to its second."""
        words = Trigger(operation, self._channel, size, self._memory, 0, self._memory, _PUT_BYTES).encode()
        return ffi.new("ProxycclTrigger *", words)

    def check(self) -> None:
        """Raises if the worker ended on an error."""
        if self._failures:
            raise ProxyCCLError(f"the proxy failed: {self._failures[0].reason}")


def _produce(fifo: Fifo, first: int, trigger: Any, count: int) -> float:
    """Pushes from this thread, waits until all are taken, and returns the seconds since the first push."""
    tail = ffi.cast("uint64_t *", fifo.tail_host)
    slots = ffi.cast("ProxycclTrigger *", fifo.slots_host)
    start = time.perf_counter()
    pushed = lib.proxyccl_bare_produce(slots, tail, fifo.size_log2, first, count, trigger[0], int(_TIMEOUT * 1e9))
    while tail[0] < first + count:
        if pushed < count or time.perf_counter() - start > _TIMEOUT:
            raise WaitTimeoutError(f"{tail[0] - first} of {count} triggers were taken out of the ring in time")
    return time.perf_counter() - start


@contextlib.contextmanager
def _bare_drain(runtime: Runtime, fifo_size: int, count: int) -> Iterator[Fifo]:
    """A fresh ring, and a thread with the bare loop that takes `count` triggers out of it."""
    fifo = Fifo(runtime, fifo_size)
    slots, tail = ffi.cast("ProxycclTrigger *", fifo.slots_host), ffi.cast("uint64_t *", fifo.tail_host)
    arguments = (slots, tail, fifo.size_log2, count, int(_TIMEOUT * 1e9))
    consumer = threading.Thread(target=lib.proxyccl_bare_drain, args=arguments, name="bare-drain")
    consumer.start()
    try:
        yield fifo
    finally:
        consumer.join()
        fifo.close()


def _bare_rate(runtime: Runtime, fifo_size: int, trigger: Any, count: int) -> float:
    """Triggers a second through a fresh ring and the bare loop. As many again warm both threads up."""
    with _bare_drain(runtime, fifo_size, 2 * count) as fifo:
        _produce(fifo, 0, trigger, count)
        return count / _produce(fifo, count, trigger, count)


def _engine_rate(proxy: Loopback, trigger: Any, count: int) -> float:
    """Triggers a second through the proxy's ring and its worker. As many again warm both threads up."""
    _produce(proxy.fifo, proxy.taken, trigger, count)
    seconds = _produce(proxy.fifo, proxy.taken, trigger, count)
    proxy.check()
    return count / seconds


def _rates(rate: Callable[[int], float], repeats: int, seconds: float, triggers: int | None, most: int) -> list[float]:
    """rate(count) `repeats` times, in about so many seconds together, if no count is given."""
    rate(_CALIBRATION)  # a kernel's first launch also loads it
    count = triggers or max(_CALIBRATION, min(most, int(rate(_CALIBRATION) * seconds / repeats)))
    return [rate(count) for _ in range(repeats)]


def _summary(values: list[float]) -> Report:
    return {"median_per_s": statistics.median(values), "best_per_s": max(values)}


def drain_rates(
    runtime: Runtime, repeats: int, fifo_size: int, seconds: float, triggers: int | None = None
) -> list[Report]:
    """The bare loop's rate and the engine's for each kind of trigger.

    Args:
        runtime: whose ring and driver are used.
        repeats: timed runs of each.
        fifo_size: slots.
        seconds: to spend, about.
        triggers: in each timed run; None for what fits in the time.
    """
    each = seconds / (2 * (1 + len(_KINDS)))  # half of each run warms up
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
        for _ in range(repeats):  # in turns: what else the machine does hits all alike
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
    """Launches of the kernel that pushes, over one size of ring.

    Args:
        kernels: of `_SOURCE`.
        proxy: whose worker may be the consumer, and whose triggers and control block are used.
        fifo_size: slots.
        shape: blocks, and threads in a block.
    """

    def __init__(self, kernels: Module, proxy: Loopback, fifo_size: int, shape: tuple[int, int]) -> None:
        self._kernel, self._proxy, self._fifo_size, self._shape = kernels["push"], proxy, fifo_size, shape
        self._trigger = bytes(ffi.buffer(proxy.trigger(Operation.DATA, 0)))
        self._producers = shape[0] * shape[1]

    def _each(self, count: int) -> int:
        return max(1, count // self._producers)

    def _timed(self, fifo: Fifo, end: int, each: int) -> float:
        tail = ffi.cast("uint64_t *", fifo.tail_host)
        control = self._proxy.segment.device_pointer
        launch = self._kernel.prepare(*self._shape, fifo.device_handle, self._trigger, control, each)
        start = time.perf_counter()
        launch()
        self._kernel.runtime.synchronize()
        while tail[0] < end:
            self._proxy.check()
            if time.perf_counter() - start > _TIMEOUT:
                raise WaitTimeoutError(f"{end - tail[0]} triggers were not taken out of the ring in time")
        return each * self._producers / (time.perf_counter() - start)

    def engine(self, count: int) -> float:
        """Triggers a second, about `count` of them, with the engine as their consumer."""
        each = self._each(count)
        return self._timed(self._proxy.fifo, self._proxy.taken + each * self._producers, each)

    def bare(self, count: int) -> float:
        """The same with the bare loop, and a fresh ring."""
        each = self._each(count)
        total = each * self._producers
        with _bare_drain(self._kernel.runtime, self._fifo_size, total) as fifo:
            return self._timed(fifo, total, each)


def kernel_rates(
    runtime: Runtime, kernels: Module, repeats: int, fifo_size: int, seconds: float, triggers: int | None = None
) -> list[Report]:
    """Triggers a second that kernels push, by ring size, layout of the producers and consumer.

    Arguments as for `drain_rates`; on a GPU rings of other sizes than `fifo_size` are measured too.
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


def round_trip(runtime: Runtime, kernels: Module, repeats: int, fifo_size: int) -> Report:
    """Nanoseconds from a push to the return of its sync, in a kernel of one thread, and the bare round trip."""
    times: dict[str, list[int]] = {"engine": [], BARE: []}
    out = Array(runtime, runtime.allocate(8 * _ROUND_TRIPS), (_ROUND_TRIPS,), as_dtype("int64"))
    with Loopback(runtime, fifo_size) as proxy:
        trigger = bytes(ffi.buffer(proxy.trigger(Operation.DATA, 0)))

        def run(name: str, consumer: str, fifo: Fifo) -> None:
            out.fill(0)
            kernels[name](1, 1, fifo.device_handle, trigger, proxy.segment.device_pointer, out, _ROUND_TRIPS)
            runtime.synchronize()
            proxy.check()
            measured = out.numpy()
            if not measured.all():
                raise WaitTimeoutError(f"{consumer}: a round trip through the ring was not answered in time")
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


def idling(runtime: Runtime, policy: IdlePolicy, pauses: int, fifo_size: int) -> Report:
    """What an idle worker costs: CPU seconds a second, and the time from a push to the release of the tail.

    The push comes from a CPU thread after a pause of 1 ms, and after one of 20 ms.
    """
    report: Report = {"policy": asdict(policy)}
    with Loopback(runtime, fifo_size, policy) as proxy:
        trigger = proxy.trigger(Operation.DATA, 0)
        for pause_ms in (1, 20):
            times = []
            for _ in range(pauses):
                time.sleep(pause_ms / 1e3)
                times.append(_produce(proxy.fifo, proxy.taken, trigger, 1))
            report[f"wake_after_{pause_ms}_ms"] = {
                "median_us": statistics.median(times) * 1e6,
                "worst_us": max(times) * 1e6,
            }
        time.sleep(0.05)
        cpu, start = time.process_time(), time.perf_counter()
        time.sleep(0.02 * pauses)
        report["cpu"] = (time.process_time() - cpu) / (time.perf_counter() - start)
    return report


def _show_drain(results: list[Report]) -> None:
    print("Drain rate beside one producing CPU thread")
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


def _show_kernels(results: list[Report], trip: Report) -> None:
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


def _show_idling(report: Report) -> None:
    policy = report["policy"]
    print(
        f"\nIdle worker: spins {policy['spin_us']:g} µs, yields {policy['yield_us']:g} µs, "
        f"then sleeps up to {policy['max_sleep_us']:g} µs"
    )
    for pause in (1, 20):
        wake = report[f"wake_after_{pause}_ms"]
        print(f"wake-up after {pause} ms: median {wake['median_us']:.0f} µs, worst {wake['worst_us']:.0f} µs")
    print(f"CPU use: {100 * report['cpu']:.1f} % of a core")


def run(seconds: float, repeats: int, fifo_size: int, json: Path | None, triggers: int | None = None) -> int:
    """The command. Returns the exit code.

    Args:
        seconds: to spend, about.
        repeats: of each timed run.
        fifo_size: slots of the rings, a power of two.
        json: where to write the results, or None.
        triggers: in each timed run; None for what fits in the time.

    Raises:
        ArgumentError: fifo_size is no power of two.
    """
    runtime = open_runtime()
    facts = machine()
    report: Report = {
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

    report["drain"] = drain_rates(runtime, repeats, fifo_size, 0.3 * seconds, triggers)
    _show_drain(report["drain"])

    try:
        kernels = _kernels(runtime)
    except CompileError as error:
        report["kernels"], report["kernels_missing"] = None, str(error)
        print(f"\nKernels were not measured: {error}", file=sys.stderr)
    else:
        report["kernels"] = kernel_rates(runtime, kernels, repeats, fifo_size, 0.6 * seconds, triggers)
        report["round_trip"] = round_trip(runtime, kernels, repeats, fifo_size)
        _show_kernels(report["kernels"], report["round_trip"])

    report["idle"] = idling(runtime, IdlePolicy(), 5 * repeats, fifo_size)
    _show_idling(report["idle"])
    if json is not None:
        write_json(json, report)
    return 0
