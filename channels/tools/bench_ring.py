"""`proxyccl bench ring`: how fast the engine drains a ring, beside a bare loop that only drains; in one process.

Three things are measured:

- The drain rate. One CPU thread produces; either a real proxy worker drains, or a C loop that takes the triggers out
  and does nothing with them (`proxyccl_bare_drain`), over a ring of the same size and kind. They alternate. The
  engine decodes each trigger, checks it against its tables, executes and counts it. A put of 0 bytes is the engine's
  own work and nothing else; a signal and a flush add a call into the transport and the runtime with a store of 8
  bytes; a put of 8 bytes adds a copy.
- What kernels see: the rate at which they push, by the layout of the producing threads, and the round trip of
  push and sync.
- Idling: what it costs to wake a worker that found nothing to do, and the CPU time that such a worker uses.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
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
from proxyccl.proxy.service import IdlePolicy, ProxyFailure, ProxyService
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
    "64 blocks of 1": (64, 1),
}

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
"""
_ROUND_TRIPS = 200


class Loopback:
    """A proxy whose one channel leads back to its own memory: no second rank takes part.

    Args:
        runtime: whose rings and copies are used.
        fifo_size: slots in the ring, a power of two.
        idle: what the worker does when there is nothing to do.
    """

    def __init__(self, runtime: Runtime, fifo_size: int, idle: IdlePolicy | None = None) -> None:
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


def _bare_rate(runtime: Runtime, fifo_size: int, trigger: Any, count: int) -> float:
    """Triggers a second through a fresh ring and the bare loop. As many again warm both threads up."""
    fifo = Fifo(runtime, fifo_size)
    slots, tail = ffi.cast("ProxycclTrigger *", fifo.slots_host), ffi.cast("uint64_t *", fifo.tail_host)
    arguments = (slots, tail, fifo.size_log2, 2 * count, int(_TIMEOUT * 1e9))
    consumer = threading.Thread(target=lib.proxyccl_bare_drain, args=arguments, name="bare-drain")
    consumer.start()
    try:
        _produce(fifo, 0, trigger, count)
        return count / _produce(fifo, count, trigger, count)
    finally:
        consumer.join()
        fifo.close()


def _engine_rate(proxy: Loopback, trigger: Any, count: int) -> float:
    """Triggers a second through the proxy's ring and its worker. As many again warm both threads up."""
    _produce(proxy.fifo, proxy.taken, trigger, count)
    seconds = _produce(proxy.fifo, proxy.taken, trigger, count)
    proxy.check()
    return count / seconds


def drain_rates(runtime: Runtime, triggers: int, repeats: int, fifo_size: int) -> list[Report]:
    """The bare loop's rate and the engine's for each kind of trigger."""
    rates: dict[str, list[float]] = {name: [] for name in (BARE, *_KINDS)}
    with Loopback(runtime, fifo_size) as proxy:
        kinds = {name: proxy.trigger(*kind) for name, kind in _KINDS.items()}
        for _ in range(repeats):
            rates[BARE].append(_bare_rate(runtime, fifo_size, next(iter(kinds.values())), triggers))
            for name, trigger in kinds.items():
                rates[name].append(_engine_rate(proxy, trigger, triggers))
    bare = statistics.median(rates[BARE])
    return [
        {
            "trigger": name,
            "median_per_s": statistics.median(values),
            "best_per_s": max(values),
            "over_bare": statistics.median(values) / bare,
        }
        for name, values in rates.items()
    ]


def _kernels(runtime: Runtime) -> Module:
    return runtime.compile(_SOURCE)


def kernel_rates(runtime: Runtime, kernels: Module, triggers: int, repeats: int, fifo_size: int) -> list[Report]:
    """Triggers a second that kernels push and the engine drains, by the layout of the producers."""
    results = []
    with Loopback(runtime, fifo_size) as proxy:
        trigger = bytes(ffi.buffer(proxy.trigger(Operation.DATA, 0)))
        for name, (blocks, threads) in _LAYOUTS.items():
            each = max(1, triggers // (blocks * threads))
            launch = kernels["push"].prepare(
                blocks, threads, proxy.fifo.device_handle, trigger, proxy.segment.device_pointer, each
            )
            rates = []
            for _ in range(repeats + 1):  # the first warms up: threads for the blocks, stacks for the fibers
                end = proxy.taken + each * blocks * threads
                start = time.perf_counter()
                launch()
                runtime.synchronize()
                while proxy.taken < end:
                    proxy.check()
                    if time.perf_counter() - start > _TIMEOUT:
                        raise WaitTimeoutError(f"{end - proxy.taken} triggers were not taken out of the ring in time")
                rates.append(each * blocks * threads / (time.perf_counter() - start))
            results.append(
                {
                    "producers": name,
                    "blocks": blocks,
                    "threads": threads,
                    "median_per_s": statistics.median(rates[1:]),
                    "best_per_s": max(rates[1:]),
                }
            )
    return results


def round_trip(runtime: Runtime, kernels: Module, fifo_size: int) -> Report:
    """Nanoseconds from a push to the return of its sync, in a kernel of one thread."""
    with Loopback(runtime, fifo_size) as proxy:
        trigger = bytes(ffi.buffer(proxy.trigger(Operation.DATA, 0)))
        out = Array(runtime, runtime.allocate(8 * _ROUND_TRIPS), (_ROUND_TRIPS,), as_dtype("int64"))
        kernels["push_and_sync"](
            1, 1, proxy.fifo.device_handle, trigger, proxy.segment.device_pointer, out, _ROUND_TRIPS
        )
        runtime.synchronize()
        proxy.check()
        times = sorted(int(ns) for ns in out.numpy())
        out.memory.close()
    return {"median_ns": statistics.median(times), "best_ns": times[0]}


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
            Column("producers", "", 32, left=True),
            Column("median", "(M/s)", 8, ".1f"),
            Column("best", "(M/s)", 8, ".1f"),
        )
    )
    table.header()
    for row in results:
        table.row(row["producers"], row["median_per_s"] / 1e6, row["best_per_s"] / 1e6)
    print(f"push + sync, 1 thread: median {trip['median_ns'] / 1e3:.2f} µs, best {trip['best_ns'] / 1e3:.2f} µs")


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


def run(triggers: int, repeats: int, fifo_size: int, json: Path | None) -> int:
    """The command. Returns the exit code.

    Args:
        triggers: in each timed run.
        repeats: of each timed run.
        fifo_size: slots of the rings, a power of two.
        json: where to write the results, or None.

    Raises:
        ArgumentError: fifo_size is no power of two.
    """
    runtime = open_runtime()
    facts = machine()
    report: Report = {"benchmark": "ring", "runtime": runtime.name, "fifo_size": fifo_size, "triggers": triggers}
    print(f"# ProxyCCL {versions().get('proxyccl', '')} ring of {fifo_size} slots, {runtime.name} runtime")
    print(f"# {facts['cpu']}, {facts['cores']} cores, load {facts['load']}")
    print(f"# median of {repeats}, {triggers} triggers each\n")

    report["drain"] = drain_rates(runtime, triggers, repeats, fifo_size)
    _show_drain(report["drain"])

    try:
        kernels = _kernels(runtime)
    except CompileError as error:
        report["kernels"], report["kernels_missing"] = None, str(error)
        print(f"\nKernels were not measured: {error}", file=sys.stderr)
    else:
        report["kernels"] = kernel_rates(runtime, kernels, triggers, repeats, fifo_size)
        report["round_trip"] = round_trip(runtime, kernels, fifo_size)
        _show_kernels(report["kernels"], report["round_trip"])

    report["idle"] = idling(runtime, IdlePolicy(), 5 * repeats, fifo_size)
    _show_idling(report["idle"])
    if json is not None:
        write_json(json, report)
    return 0
