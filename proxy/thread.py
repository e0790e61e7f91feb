"""A thread that runs workers of the engine, of one service or of many.

It enters the C engine and stays there without the GIL; it comes back when one of its workers has something to tell. It
knows no service: who hands a worker over says who is told of its end.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from proxyccl.device.errors import ArgumentError
from proxyccl.proxy import _engine

ffi, lib = _engine.ffi, _engine.lib

_LONGEST_US = 1e9

OnExit = Callable[[int, Any], None]
"""Called in the thread with a ProxycclExit and a ProxycclExitInfo, which is good until it returns."""


@dataclass(frozen=True)
class IdlePolicy:
    """What a thread does when the rings of all its workers are empty.

    Sleeps grow with the time that it has been idle, so that waking late adds at most a 32nd to a pause. The defaults
    cost about 3 % of a core on a virtual machine with two; with `max_sleep_us` of 200 it is 11 %.
    `proxyccl bench ring` measures both.

    Attributes:
        spin_us: first it spins for this long. Where cores are fewer than threads this is what a kernel that pushes
            and waits for the core pays each time; where there are enough, yielding answers as fast.
        yield_us: then it yields the core between looks for this long.
        max_sleep_us: then it sleeps between looks, for a 32nd of the time idle, up to this. That is the most that
            waking costs, beside what the system takes.
    """

    spin_us: float = 5.0
    yield_us: float = 500.0
    max_sleep_us: float = 1000.0

    def __post_init__(self) -> None:
        for name in ("spin_us", "yield_us", "max_sleep_us"):
            if not 0 <= getattr(self, name) <= _LONGEST_US:
                raise ArgumentError(name, f"must be from 0 to {_LONGEST_US:.0e} µs, not {getattr(self, name)!r}")


def _pin(cores: Collection[int]) -> None:
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, ValueError, OverflowError) as error:
        raise ArgumentError("cores", f"a thread can't run on {sorted(cores)}: {error}") from None


class ProxyThread:
    """Runs workers in turn, and waits where it has none.

    Args:
        name: the thread's.
        idle: what it does when there is nothing to do.
        cores: numbers of those that it may run on; None for any that its process may.
        begin: called in the thread before anything else.

    Raises:
        ArgumentError: there are no such cores.
    """

    def __init__(
        self,
        name: str,
        idle: IdlePolicy,
        cores: Collection[int] | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        policy = ffi.new("ProxycclIdlePolicy *")
        policy.spin_ns, policy.yield_ns = int(idle.spin_us * 1000), int(idle.yield_us * 1000)
        policy.max_sleep_ns = max(1000, int(idle.max_sleep_us * 1000))
        self._pointer = lib.proxyccl_thread_create(policy)
        self._begin = begin
        self._cores = cores
        self._changed = threading.Condition()
        self._on_exit: dict[int, OnExit] = {}  # by the worker's address
        self._closing = False
        self._refusal: ArgumentError | None = None
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        if cores is not None:
            self._begun.wait()
            if self._refusal is not None:
                raise self._refusal

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in it."""
        return self._thread is threading.current_thread()

    @property
    def name(self) -> str:
        """Its name."""
        return self._thread.name

    @property
    def native_id(self) -> int:
        """The system's number of the thread."""
        number = self._thread.native_id
        assert number is not None
        return number

    def add(self, worker: Any, on_exit: OnExit) -> None:
        """Hands a worker over. It comes back with the first exit that is not for a handler."""
        with self._changed:
            self._on_exit[int(ffi.cast("uintptr_t", worker))] = on_exit
            lib.proxyccl_thread_add_worker(self._pointer, worker)
            self._changed.notify()

    def _run(self) -> None:
        try:
            if self._cores is not None:
                _pin(self._cores)
        except ArgumentError as error:
            self._refusal = error
            return
        finally:
            self._begun.set()
        self._begin()
        info = ffi.new("ProxycclExitInfo *")
        while True:
            reason = lib.proxyccl_thread_run(self._pointer, info)
            if reason == lib.PROXYCCL_EXIT_NO_WORKERS:
                with self._changed:
                    self._changed.wait_for(lambda: self._on_exit or self._closing)
                    if not self._on_exit:
                        return
                continue
            worker = int(ffi.cast("uintptr_t", info.worker))
            with self._changed:
                of_handler = reason == lib.PROXYCCL_EXIT_HANDLER
                on_exit = self._on_exit[worker] if of_handler else self._on_exit.pop(worker)
            on_exit(reason, info)

    def close(self, timeout: float) -> bool:
        """Ends the thread when its workers have come back. False if that did not happen in time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if not self.is_current:
            self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        if self._pointer is not None:
            lib.proxyccl_thread_destroy(self._pointer)  # not at this object's end: the thread may be in it then
            self._pointer = None
        return True
