"""The threads that poll the wires of a service's staged connections (engine/staged_transport.h).

The service's own workers also poll a wire while the wire's thread sleeps. So nothing waits for these threads, and an
idle one soon sleeps. The threads speed up long transfers, because one thread's sockets do not saturate a network.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

from proxyccl.proxy import _engine
from proxyccl.proxy.created import created
from proxyccl.proxy.observe.segment import ObservedSegment
from proxyccl.proxy.thread import IdlePolicy
from proxyccl.proxy.transports.engine_connection import EngineRuntime
from proxyccl.proxy.workers import OnEvent, OwnThreads, Workers

ffi, lib = _engine.ffi, _engine.lib


_IDLE = IdlePolicy(yield_us=50.0)
"""A worker wakes them, and takes over meanwhile (for as long as SERVED_NS of staged_transport.c). Awake threads take
cores from those with work.
"""


class WireWorkers:
    """A worker and a thread for each endpoint, which serve the endpoint's wires to all peers.

    Args:
        engine: the runtime of the service.
        control: address of the ProxycclControl whose abort word stops the workers.
        counters: the service's table of counters.
        count: number of threads, one for each endpoint.
        cores: cores that the threads may run on; None for any.
        name: the prefix of the threads' names.
        on_event: see `Workers.start`.
        on_lost: see `Workers.start`.

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
            threads = OwnThreads(count, _IDLE, cores, f"{name}-wire")
            self._workers = Workers(engine, self._service, self._observed, threads)
            undo.pop_all()
        self._shared = [ffi.new("ProxycclWireThread *") for _ in range(count)]
        for number, shared in enumerate(self._shared):
            shared.asleep = ffi.cast("uint32_t *", self._workers[number].thread.asleep.ptr)
        self._workers.start(on_event, on_lost)

    def add(self, wires: Sequence[tuple[int, Any]]) -> None:
        """Makes each thread poll the connection's wires that have the thread's number. A thread without room leaves a
        wire to the service's workers, which may not know the connection yet.
        """
        for number, wire in wires:
            lib.proxyccl_staged_wire_set_thread(wire, self._shared[number])
            if lib.proxyccl_worker_add_connection(self._workers[number].pointer, wire):
                lib.proxyccl_staged_wire_set_thread(wire, ffi.NULL)

    def close(self, timeout: float) -> bool:
        """Ends the threads and frees everything. Returns False if a thread did not end in time; another call waits
        again.
        """
        self._workers.stop(drained=False)
        if not self._workers.await_ended(timeout):
            return False
        lib.proxyccl_service_destroy(self._service)
        self._observed.close()
        return True
