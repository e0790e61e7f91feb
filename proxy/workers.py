"""Runs the workers of one service, and the threads that serve the links (wires) of staged connections. Each worker
drains its rings in a thread, which other workers may share.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from msgspec import Struct

from proxyccl.device.arguments.integers import as_integer
from proxyccl.device.errors import ResourceError
from proxyccl.device.memory.shared_memory import SharedMemory
from proxyccl.device.runtime import Runtime
from proxyccl.proxy import _engine
from proxyccl.proxy.observe.segment import ObservedSegment
from proxyccl.proxy.ring import Ring
from proxyccl.proxy.thread import IdlePolicy, ProxyThread, created
from proxyccl.proxy.transports.transport import EngineRuntime

ffi, lib = _engine.ffi, _engine.lib

MAX_RINGS: int = lib.PROXYCCL_MAX_RINGS
_POLL_SECONDS = 0.0002
_UNUSED_THREAD_SECONDS = 10.0
_WIRE_IDLE = IdlePolicy(yield_us=50.0)
"""The idle policy of the threads that serve wires. A worker that wakes a wire's thread serves the wire itself until the
thread is awake. So the thread may sleep early, which leaves the core to a thread with work.
"""


def require_rings(fifos: object, threads: object) -> tuple[int, int]:
    """Returns the number of rings and the number of threads. Raises ArgumentError if there are fewer rings than
    threads, or more than the engine allows.
    """
    number = as_integer(threads, "proxy_threads", f"must be an integer from 1 to {MAX_RINGS}", 1, MAX_RINGS)
    expected = f"must be an integer from proxy_threads ({number}) to {MAX_RINGS}"
    return as_integer(fifos, "fifos", expected, number, MAX_RINGS), number


class OwnThreads(Struct, frozen=True):
    """Options of the `count` threads that are created for a service's workers, one for each worker. The threads may run
    on `cores` (None for all cores), and their names begin with `name`.
    """

    count: int
    idle: IdlePolicy
    cores: Collection[int] | None
    name: str


class Worker(Struct, frozen=True):
    """A worker of the engine."""

    pointer: Any  # a ProxycclWorker, freed only with this object, because threads may query a worker that has ended
    stats: Any  # the worker's ProxycclWorkerStats, which observers read
    thread: ProxyThread  # the thread that runs the worker
    ended: threading.Event  # set unless the worker was started and has not ended


OnEvent = Callable[[Worker, int, Any], None]
"""A function that is called in a worker's thread with the worker, a ProxycclOutcome, and a ProxycclExitInfo, which is
valid only during the call.
"""


def _begin(runtime: Runtime, unbound_threads: int) -> None:
    """Prepares a thread of `OwnThreads` before it runs a worker. `unbound_threads` is the number of threads in
    `OwnThreads`; 0 if `cores` were chosen for the threads.
    """
    runtime.activate(for_proxy=True)
    # Some launchers bind each rank to one core, on which the program spins while it waits for its GPU. A worker on the
    # same core would have to wait for time slices, so each trigger would cost milliseconds.
    if len(os.sched_getaffinity(0)) <= unbound_threads:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))


class Workers:
    """A service's workers and their threads.

    Args:
        engine: the runtime whose driver issues the workers' copies.
        service: a ProxycclService.
        observed: the segment in which the workers publish their activity, with room for every worker.
        threads: the threads to create, or one existing thread for each worker.
        idle: the idle policy that the workers require on existing threads; None for the threads' own policy.
    """

    def __init__(
        self,
        engine: EngineRuntime,
        service: Any,
        observed: ObservedSegment,
        threads: OwnThreads | Sequence[ProxyThread],
        idle: IdlePolicy | None = None,
    ) -> None:
        self._idle = idle
        self._workers: list[Worker] = []
        self._own_threads: list[ProxyThread] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.discard)
            if isinstance(threads, OwnThreads):
                begin = functools.partial(_begin, engine.runtime, threads.count if threads.cores is None else 0)
                for i in range(threads.count):
                    name = f"{threads.name}-proxy-{i}"
                    self._own_threads.append(ProxyThread(name, threads.idle, threads.cores, begin, engine.functions))
                threads = self._own_threads
            for i, thread in enumerate(threads):
                stats = observed.worker(i)
                made = created(lib.proxyccl_worker_create(service, stats), "a worker of the proxy")
                worker = Worker(ffi.gc(made, lib.proxyccl_worker_destroy), stats, thread, threading.Event())
                worker.ended.set()
                self._workers.append(worker)
                if thread not in self._own_threads:  # a shared thread runs workers of several devices
                    make_current = ffi.cast("void *", engine.functions.make_current)
                    lib.proxyccl_worker_set_context(worker.pointer, make_current, engine.functions.context)
            undo.pop_all()

    def __len__(self) -> int:
        return len(self._workers)

    def __getitem__(self, number: int) -> Worker:
        return self._workers[number]

    @property
    def ended(self) -> list[bool]:
        return [worker.ended.is_set() for worker in self._workers]

    def add_rings(self, rings: Sequence[Ring]) -> None:
        """Assigns rings to the workers round-robin."""
        for i, ring in enumerate(rings):
            worker = self._workers[i % len(self._workers)]
            lib.proxyccl_worker_add_ring(worker.pointer, ring.slots, ring.tail, ring.size_log2)

    def start(self, on_event: OnEvent, on_lost: Callable[[BaseException], None]) -> None:
        """Adds the workers to their threads. `on_event` is called when the engine returns for a worker, and
        `on_lost` if an error has ended a worker's thread.
        """

        def told(worker: Worker, reason: int, info: Any) -> None:
            try:
                on_event(worker, reason, info)
            finally:
                if reason != lib.PROXYCCL_EXIT_HANDLER:
                    worker.stats.started_ns = 0
                    worker.ended.set()

        def lost(worker: Worker, error: BaseException) -> None:
            worker.stats.started_ns = 0
            worker.ended.set()
            on_lost(error)

        for worker in self._workers:
            worker.ended.clear()
            on_exit, on_loss = functools.partial(told, worker), functools.partial(lost, worker)
            worker.thread.add(worker.pointer, worker.stats, on_exit, on_loss, self._idle)

    @property
    def asleep(self) -> list[SharedMemory]:
        """The words with which launches wake the workers' threads, one for each thread."""
        return list({worker.thread: worker.thread.asleep for worker in self._workers}.values())

    @contextlib.contextmanager
    def paused(self, timeout: float) -> Iterator[None]:
        """Implements `ProxyService.paused`."""
        deadline = time.monotonic() + timeout
        asked = [lib.proxyccl_worker_pause(worker.pointer) for worker in self._workers]
        try:
            for worker, number in zip(self._workers, asked, strict=True):
                while lib.proxyccl_worker_paused(worker.pointer) != number and not worker.ended.is_set():
                    if time.monotonic() >= deadline:
                        raise ResourceError(f"a proxy thread did not pause within {timeout:g} s")
                    time.sleep(_POLL_SECONDS)
            yield
        finally:
            for worker in self._workers:
                lib.proxyccl_worker_resume(worker.pointer)

    def ask_to_drain(self) -> list[int]:
        """Asks every worker to report when its rings are empty and nothing is outstanding. Returns the requests'
        numbers, for `await_drained`.
        """
        return [lib.proxyccl_worker_drain(worker.pointer) for worker in self._workers]

    def await_drained(self, asked: list[int], timeout: float, given_up: Callable[[], bool]) -> bool:
        """Waits for the reports that `ask_to_drain` requested. Returns False on a time-out, if `given_up` returned
        True, or if a worker ended.
        """
        deadline = time.monotonic() + timeout
        for worker, number in zip(self._workers, asked, strict=True):
            while lib.proxyccl_worker_drained(worker.pointer) != number:
                if worker.ended.is_set() or given_up() or time.monotonic() >= deadline:
                    return False
                time.sleep(_POLL_SECONDS)
        return True

    def stop(self, *, drained: bool) -> None:
        """Asks all workers to end: if `drained`, once their rings are empty and nothing is outstanding, else
        immediately.
        """
        for worker in self._workers:
            (lib.proxyccl_worker_stop if drained else lib.proxyccl_worker_abandon)(worker.pointer)

    def await_ended(self, timeout: float) -> bool:
        """Waits until all workers, and the threads created for them, have ended; waits at most `timeout` seconds for
        each. Returns False if a worker or thread has not ended.
        """
        ended = [worker.ended.wait(0 if worker.thread.is_current else timeout) for worker in self._workers]
        # If a worker has not ended in time, its thread can't end either, so the call does not wait for the thread.
        closed = [thread.close(timeout if ended[i] else 0) for i, thread in enumerate(self._own_threads)]
        return all(ended) and all(closed)

    def discard(self) -> None:
        """Ends the threads that were created for workers that never started."""
        for thread in self._own_threads:
            thread.close(_UNUSED_THREAD_SECONDS)


class WireWorkers:
    """The threads that poll the wires of staged connections (engine/staged_transport.h): for each of `count` endpoints,
    one thread with one worker polls the endpoint's wires to all peers. The other arguments are the arguments of the
    service.

    While a wire's thread sleeps, the service's own workers poll the wire, so no transfer waits for the thread to wake.
    The threads speed up long transfers, because one thread that drives sockets does not saturate a network.

    Raises:
        ArgumentError: there are no such cores.
        ResourceError: there is no memory for a thread.
    """

    def __init__(
        self,
        engine: EngineRuntime,
        control: int,
        counters: Any,
        count: int,
        cores: Collection[int] | None,
        name: str,
        on_event: OnEvent,
        on_lost: Callable[[BaseException], None],
    ) -> None:
        with contextlib.ExitStack() as undo:
            made = lib.proxyccl_service_create(ffi.cast("ProxycclControl *", control), counters)
            self._service = created(made, "the wires of a proxy")
            undo.callback(lib.proxyccl_service_destroy, self._service)
            self._observed = ObservedSegment(count)
            undo.callback(self._observed.close)
            threads = OwnThreads(count, _WIRE_IDLE, cores, f"{name}-wire")
            self._workers = Workers(engine, self._service, self._observed, threads)
            undo.pop_all()
        self._shared = [ffi.new("ProxycclWireThread *") for _ in range(count)]
        for number, shared in enumerate(self._shared):
            shared.asleep = ffi.cast("uint32_t *", self._workers[number].thread.asleep.ptr)
        self._workers.start(on_event, on_lost)

    def add(self, wires: Sequence[tuple[int, Any]]) -> None:
        """Assigns each wire of a connection to the thread that has the wire's number, and that then polls the wire.
        Call this method before the connection is added to a worker of the service. If a thread has no room for a wire,
        only the service's workers poll the wire.
        """
        for number, wire in wires:
            lib.proxyccl_staged_wire_set_thread(wire, self._shared[number])
            if lib.proxyccl_worker_add_connection(self._workers[number].pointer, wire):
                lib.proxyccl_staged_wire_set_thread(wire, ffi.NULL)

    def close(self, timeout: float) -> bool:
        """Ends the threads and frees all their memory. Returns False if a thread did not end in time; another call then
        waits again.
        """
        self._workers.stop(drained=False)
        if not self._workers.await_ended(timeout):
            return False
        lib.proxyccl_service_destroy(self._service)
        self._observed.close()
        return True
