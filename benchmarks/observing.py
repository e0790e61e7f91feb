"""The cost of observing a proxy: python benchmarks/observing.py

The proxy has one channel, whose destination is the rank's own memory. The proxy is measured alternately in three modes:
without an observer ("nobody looks"); while another process reads all counters every 10 ms, a hundred times as often as
`proxyccl top` does ("looked at"); and while another process traces the proxy ("traced"). Two things are measured:

- The engine alone, by the CPU time of its thread. One thread fills a ring and then drains it. Only one core is used, so
  other load on the machine matters little.
- The rate at which a kernel pushes while the proxy's thread drains the ring.
"""

from __future__ import annotations

import argparse
import os
import select
import statistics
import subprocess
import sys
import time
from types import TracebackType

import bare_loops
from ring import Loopback, as_parameter

from proxyccl.channels.segment.control import ControlSegment, create_segment
from proxyccl.device.errors import WaitTimeoutError
from proxyccl.device.runtime import Runtime
from proxyccl.device.runtimes import open_runtime
from proxyccl.proxy import _engine
from proxyccl.proxy.observe import publications
from proxyccl.proxy.observe.publications import Description, Publication, RingPlace
from proxyccl.proxy.observe.reader import Observer
from proxyccl.proxy.observe.segment import ObservedSegment
from proxyccl.proxy.observe.tracing import Tracer
from proxyccl.proxy.ring import Fifo
from proxyccl.proxy.shared_words import SharedWords
from proxyccl.proxy.transports.table import find_transport
from proxyccl.proxy.transports.transport import EngineRuntime
from proxyccl.proxy.trigger import Operation, Trigger
from proxyccl.tools import options
from proxyccl.tools.results import Fields, machine, versions, write_json
from proxyccl.tools.tables import Column, Table

ffi, lib = _engine.ffi, _engine.lib

NOBODY, LOOKED_AT, TRACED = MODES = ("nobody looks", "looked at", "traced")
JOB = f"observing-{os.getpid()}"
_TIMEOUT = 30.0
_SLOTS = 1 << 14  # slots of a ring that fits into a core's cache; each timed run fills the ring once
_KINDS = {
    "put of 0 bytes": (Operation.DATA, 0),
    "signal": (Operation.SIGNAL, 0),
    "flush": (Operation.FLUSH, 0),
    "put of 8 bytes + signal": (Operation.DATA | Operation.SIGNAL, 8),
}
_LAYOUTS = {"1 thread": (1, 1), "1 block of 128": (1, 128), "8 blocks of 256": (8, 256)}
_SOURCE = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" __global__ void push(Fifo ring, ProxycclTrigger trigger, ProxycclControl* control, int count) {
  for (int i = 0; i < count; ++i)
    if (ring.push(trigger, control) == kNoTicket) return;
}
"""


def observe(job: str) -> None:
    """Observes the only proxy of a job, in a separate process; each line on standard input sets the mode."""
    while mode := sys.stdin.readline().strip():
        if mode == NOBODY:
            print(mode, flush=True)
            continue
        ((path, publication),) = publications.find(job)
        with Observer(publication) if mode == LOOKED_AT else Tracer(path, publication) as observer:
            print(mode, flush=True)
            while not select.select([sys.stdin], [], [], 0.01)[0]:
                if isinstance(observer, Observer):
                    observer.snapshot()
                else:
                    observer.fetch()


class Other:
    """Starts and controls the observing process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--observe", JOB], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Other:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def does(self, mode: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{mode}\n")
        self._process.stdin.flush()
        if self._process.stdout.readline().strip() != mode:
            raise SystemExit("the observing process ended")


class Alone:
    """An engine without a thread of its own; the thread that calls `nanoseconds` runs the engine."""

    def __init__(self, runtime: Runtime) -> None:
        self._segment = create_segment(runtime, 0, _TIMEOUT)
        words = SharedWords(self._segment.memory, ControlSegment.service_offset)
        self._service = lib.proxyccl_service_create(
            ffi.cast("ProxycclControl *", self._segment.host_pointer), words.table
        )
        self._observed = ObservedSegment(1)
        self._worker = lib.proxyccl_worker_create(self._service, self._observed.worker(0))
        self._asleep = ffi.new("uint32_t *")
        self._thread = lib.proxyccl_thread_create(ffi.new("ProxycclIdlePolicy *"), self._asleep)
        self._ring = Fifo(runtime, _SLOTS)
        lib.proxyccl_worker_add_ring(self._worker, self._ring.slots, self._ring.tail, self._ring.size_log2)
        buffer = runtime.allocate(16)
        made = find_transport("copy").connect(EngineRuntime(runtime), None)
        self._kept = *made.owned, buffer
        self._connection = made.pointer
        self._observed.add_connection(0, 0, 0, "copy")
        lib.proxyccl_worker_add_connection(self._worker, self._connection)
        semaphore = ffi.cast("uint64_t *", self._segment.semaphore_host(0))
        entry = self._connection, semaphore, words.flushed, words.completed, ffi.new("ProxycclSignals *")[0]
        lib.proxyccl_service_set_channel(self._service, 0, *entry)
        self._observed.place_channel(0, 0, 0, 0)
        keys = ffi.new("uint64_t[]", lib.PROXYCCL_RAILS)
        lib.proxyccl_service_set_memory(
            self._service, 0, ffi.cast("char *", buffer.ptr), buffer.nbytes, keys, 0, ffi.NULL
        )
        self._info = ffi.new("ProxycclExitInfo *")
        self._published = publications.publish(
            Publication.of_this_process(
                Description.of_this_program(0, 1, JOB),
                runtime.name,
                workers=1,
                observed=self._observed.memory.handle.hex(),
                counters=words.counters_handle.hex(),
                rings=(RingPlace(self._ring.pinned.handle.hex(), 0, self._ring.size_log2),),
            )
        )

    def __enter__(self) -> Alone:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        publications.withdraw(self._published)
        lib.proxyccl_connection_destroy(self._connection)
        lib.proxyccl_thread_destroy(self._thread)
        lib.proxyccl_worker_destroy(self._worker)
        lib.proxyccl_service_destroy(self._service)
        for resource in (*self._kept, self._ring, self._observed, self._segment):
            resource.close()

    def nanoseconds(self, operation: Operation, size: int) -> float:
        """Returns the CPU time of one trigger in ns, averaged over a full ring."""
        first = self._ring.taken
        words = Trigger(operation, 0, size, 0, 0, 0, 8).encode()
        pushed = bare_loops.produce(self._ring, first, words, _SLOTS, _TIMEOUT)
        lib.proxyccl_worker_stop(self._worker)  # the worker then returns when the ring is empty
        lib.proxyccl_thread_add_worker(self._thread, self._worker)
        start = time.thread_time_ns()
        reason = lib.proxyccl_thread_run(self._thread, self._info)
        spent = time.thread_time_ns() - start
        if pushed < _SLOTS or reason != lib.PROXYCCL_EXIT_STOPPED or self._ring.taken < first + _SLOTS:
            raise SystemExit("the engine did not drain its ring")
        return spent / _SLOTS


def _summary(of_mode: dict[str, list[float]], *, rates: bool) -> Fields:
    """Returns a summary for each mode. A summary has the median of rates, but the minimum of CPU times, because other
    load can only increase CPU times.
    """
    counts = {mode: statistics.median(values) if rates else min(values) for mode, values in of_mode.items()}
    base = counts[NOBODY]
    return {
        mode: {
            "median": statistics.median(values),
            "best": max(values) if rates else min(values),
            "rate_of_unobserved": counts[mode] / base if rates else base / counts[mode],
        }
        for mode, values in of_mode.items()
    }


def engine_alone(runtime: Runtime, repeats: int) -> list[Fields]:
    """Measures the CPU time of one trigger in ns, by kind of trigger and mode."""
    times: dict[str, dict[str, list[float]]] = {kind: {mode: [] for mode in MODES} for kind in _KINDS}
    with Alone(runtime) as engine, Other() as other:
        for _ in range(repeats):
            for mode in MODES:
                other.does(mode)
                for kind, what in _KINDS.items():
                    times[kind][mode] += [engine.nanoseconds(*what) for _ in range(50)]
        other.does(NOBODY)
    return [{"trigger": kind, **_summary(of_mode, rates=False)} for kind, of_mode in times.items()]


def kernel_rates(runtime: Runtime, repeats: int, seconds: float) -> list[Fields]:
    """Measures how many triggers kernels push per second, for each kind of trigger, layout of the kernel's threads, and
    mode.
    """
    kernel = runtime.compile(_SOURCE)["push"]
    what = {"put of 0 bytes": _KINDS["put of 0 bytes"], "put of 8 bytes + signal": _KINDS["put of 8 bytes + signal"]}
    rates: dict[tuple[str, str], dict[str, list[float]]] = {}
    with Loopback(runtime, 1024, description=Description.of_this_program(0, 1, JOB)) as proxy, Other() as other:
        tail = proxy.fifo.tail

        def rate(shape: tuple[int, int], trigger: bytes, each: int) -> float:
            pushed = each * shape[0] * shape[1]
            end = proxy.taken + pushed
            launch = kernel.prepare(*shape, proxy.fifo.device_handle, trigger, proxy.segment.device_pointer, each)
            start = time.perf_counter()
            launch()
            runtime.synchronize()
            while tail[0] < end:
                proxy.check()
                if time.perf_counter() - start > _TIMEOUT:
                    raise WaitTimeoutError(f"{end - tail[0]} triggers were not taken out of the ring in time")
            return pushed / (time.perf_counter() - start)

        cases = [(kind, layout) for kind in what for layout in _LAYOUTS]
        counts = {}
        for kind, layout in cases:
            shape, trigger = _LAYOUTS[layout], as_parameter(proxy.trigger(*what[kind]))
            rate(shape, trigger, 10)
            a_run = seconds / (len(cases) * len(MODES) * repeats)
            counts[kind, layout] = max(10, int(rate(shape, trigger, 100) * a_run) // (shape[0] * shape[1]))
        for _ in range(repeats):
            for mode in MODES:
                other.does(mode)
                for kind, layout in cases:
                    trigger = as_parameter(proxy.trigger(*what[kind]))
                    of_mode = rates.setdefault((kind, layout), {name: [] for name in MODES})
                    of_mode[mode].append(rate(_LAYOUTS[layout], trigger, counts[kind, layout]))
        other.does(NOBODY)
    return [
        {"trigger": kind, "producers": layout, **_summary(of_mode, rates=True)}
        for (kind, layout), of_mode in rates.items()
    ]


def _show(title: str, rows: list[Fields], *names: str, value: str, scale: float = 1.0) -> None:
    print(f"\n{title}")
    table = Table(
        (
            *(Column(name, "", 24 if name == "trigger" else 16, left=True) for name in names),
            Column(NOBODY, "", 13, ".2f"),
            *(column for mode in MODES[1:] for column in (Column(mode, "", 10, ".2f"), Column("rate", "", 6, ".0%"))),
        )
    )
    table.header()
    for row in rows:
        observed = [
            number for mode in MODES[1:] for number in (row[mode][value] * scale, row[mode]["rate_of_unobserved"])
        ]
        table.row(*(row[name] for name in names), row[NOBODY][value] * scale, *observed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-t", "--seconds", type=options.count, default=30, help="time to spend (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="measure less")
    parser.add_argument("--json", type=options.json_file, metavar="FILE", help="write the results to FILE")
    parser.add_argument("--observe", metavar="JOB", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.observe:
        observe(parsed.observe)
        return 0
    runtime = open_runtime()
    facts = machine()
    repeats = 3 if parsed.quick else 15
    print(f"# ProxyCCL {versions().get('proxyccl', '')} cost of being observed, {runtime.name} runtime")
    print(f"# {facts['cpu']}, {facts['cores']} cores, load {facts['load']}")
    print("# rate: triggers a second, over those of the same triggers while nobody looks")
    alone = engine_alone(runtime, repeats) if runtime.name == "host" else []
    if alone:
        _show("The engine alone: least CPU time of a trigger, ns", alone, "trigger", value="best")
    pushed = kernel_rates(runtime, repeats, 5 if parsed.quick else parsed.seconds)
    title = "Kernels that push: millions of triggers a second, medians"
    _show(title, pushed, "trigger", "producers", value="median", scale=1e-6)
    if parsed.json is not None:
        results = {"benchmark": "observing", "runtime": runtime.name, "device": runtime.describe(), "repeats": repeats}
        write_json(parsed.json, {**results, "engine_alone": alone, "kernels": pushed})
    return 0


if __name__ == "__main__":
    sys.exit(main())
