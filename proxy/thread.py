"""A thread that runs workers of the engine, of one service or of many.

It enters the C engine and stays there without the GIL until the engine returns for one of its workers. It does not know
about services: a worker is added with a function to call then.
"""

from __future__ import annotations

import numbers
import os
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from proxyccl.device.errors import ArgumentError, ResourceError
from proxyccl.device.memory.shared_memory import SharedMemory
from proxyccl.device.process.threads import Thread
from proxyccl.device.runtime import DriverCalls
from proxyccl.proxy import _engine
from proxyccl.proxy.created import created

ffi, lib = _engine.ffi, _engine.lib

LONGEST_US = 1e9
"""The longest time of an `IdlePolicy`, in µs."""

OnExit = Callable[[int, "_engine.ProxycclExitInfoPointer"], None]
"""Called in the thread with a ProxycclOutcome and a ProxycclExitInfo, which is valid until it returns."""


@dataclass(frozen=True)
class IdlePolicy:
    """The policy of a thread when the rings of all its workers are empty.

    It spins, then yields, then sleeps for a 32nd of its idle time, so waking late adds at most a 32nd to a pause. While
    transfers are under way, it yields for 1.6 ms, because waking from a short sleep takes as long as the sleep. After
    a long pause it sleeps for a 1024th of that, for at most 10 ms, even if this is longer than `max_sleep_us`: a thread
    that was idle for 10 s uses 0.1 % of a core. A call that this library launches wakes a sleeping thread before the
    launch. A graph that another library replays does not: the thread then finds the work when its sleep ends.

    The defaults are for few cores. Where there are enough, a proxy without a policy has that of `where_cores_suffice`.

    Attributes:
        spin_us: how long it polls without a pause. After 50 µs of it the thread yields its core between polls: whatever
            else the system runs on that core would otherwise wait for a whole time slice. If there are fewer cores than
            threads, a kernel that pushes and then needs the core waits this long each time.
        yield_us: how long it then yields the core between two polls.
        max_sleep_us: the longest sleep between two polls after that, except after long pauses. So it is the longest
            delay of waking, apart from the system's own.

    Raises:
        ArgumentError: a time is out of range.
    """

    spin_us: float = 5.0
    yield_us: float = 500.0
    max_sleep_us: float = 1000.0

    def __post_init__(self) -> None:
        for name in ("spin_us", "yield_us", "max_sleep_us"):
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= float(value) <= LONGEST_US:
                raise ArgumentError(name, f"must be a number from 0 to {LONGEST_US:.0e} µs, not {value!r}")
            object.__setattr__(self, name, float(value))  # messages to a daemon take Python's own numbers

    @classmethod
    def always_awake(cls) -> IdlePolicy:
        """A thread that never sleeps while a communicator is open. It answers at once and costs a whole core."""
        return cls(yield_us=LONGEST_US, max_sleep_us=50.0)

    @classmethod
    def where_cores_suffice(cls) -> IdlePolicy:
        """A thread that sleeps for at most 50 µs at once until it was idle for 50 ms: about a tenth of a core."""
        return cls(max_sleep_us=50.0)

    def __str__(self) -> str:
        if self.yield_us == LONGEST_US:
            return "always awake"
        return f"longest sleep {self.max_sleep_us:g} µs"

    @property
    def times(self) -> tuple[float, float, float]:
        """Its fields, in order."""
        return self.spin_us, self.yield_us, self.max_sleep_us

    @staticmethod
    def most_awake(policies: Iterable[IdlePolicy]) -> IdlePolicy:
        """The policy that wakes no later than any of these, of which there is at least one."""
        each = list(policies)
        return IdlePolicy(
            max(policy.spin_us for policy in each),
            max(policy.yield_us for policy in each),
            min(policy.max_sleep_us for policy in each),
        )


def _policy(idle: IdlePolicy) -> _engine.ProxycclIdlePolicyPointer:
    policy = ffi.new("ProxycclIdlePolicy *")
    policy.spin_ns, policy.yield_ns = int(idle.spin_us * 1000), int(idle.yield_us * 1000)
    policy.max_sleep_ns = max(1000, int(idle.max_sleep_us * 1000))
    return policy


def _pin(cores: Collection[int]) -> None:
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, ValueError, OverflowError) as error:
        raise ArgumentError("cores", f"a thread can't run on {sorted(cores)}: {error}") from None


class ProxyThread:
    """Runs workers in turn, and waits while it has none.

    Args:
        name: the thread's name.
        idle: its policy for workers that have none.
        cores: numbers of the cores that it may run on; None for all of its process.
        begin: called in the thread before anything else.
        functions: those of a runtime whose waiting kernels may help it; None to run the workers without help.

    Attributes:
        asleep: the word by which a launch in any process wakes it (waking.h).

    Raises:
        ArgumentError: there are no such cores.
        ResourceError: there is no memory for a thread.
    """

    def __init__(
        self,
        name: str,
        idle: IdlePolicy,
        cores: Collection[int] | None = None,
        begin: Callable[[], None] = lambda: None,
        functions: DriverCalls | None = None,
    ) -> None:
        self._default = self._idle = idle
        self._served: dict[int, tuple[IdlePolicy, _engine.ProxycclWorkerStatsPointer]] = {}  # by the worker's address
        self.asleep = SharedMemory.allocate(ffi.sizeof("uint32_t"))
        made = lib.proxyccl_thread_create(_policy(idle), ffi.cast("uint32_t *", self.asleep.ptr))
        self._pointer = created(made, "a thread of the proxy")
        if functions is not None and functions.add_helper:
            add, remove = ffi.cast("void *", functions.add_helper), ffi.cast("void *", functions.remove_helper)
            lib.proxyccl_thread_take_help(self._pointer, add, remove)
        self._begin = begin
        self._cores = cores
        self._changed = threading.Condition()
        self._on_exit: dict[int, OnExit] = {}  # by the worker's address
        self._on_lost: dict[int, Callable[[BaseException], None]] = {}  # likewise
        self._error: BaseException | None = None
        self._closing = False
        self._refusal: ArgumentError | None = None
        self._begun = threading.Event()
        self._thread = Thread(self._run, name, failed=self._fail)
        try:
            self._thread.start()
        except ResourceError:
            lib.proxyccl_thread_destroy(self._pointer)
            raise
        if cores is not None:
            self._begun.wait()
            if self._refusal is not None:
                raise self._refusal

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return self._thread is threading.current_thread()

    @property
    def name(self) -> str:
        """The thread's name."""
        return self._thread.name

    @property
    def native_id(self) -> int:
        """The system's thread id."""
        number = self._thread.native_id
        assert number is not None
        return number

    @property
    def idle(self) -> IdlePolicy:
        """Its policy now: the most awake of its workers', and its own if it has none."""
        return self._idle

    def add(
        self,
        worker: _engine.ProxycclWorkerPointer,
        stats: _engine.ProxycclWorkerStatsPointer,
        on_exit: OnExit,
        on_lost: Callable[[BaseException], None] = lambda _: None,
        idle: IdlePolicy | None = None,
    ) -> None:
        """Hands a worker over. It comes back with the first exit that is not for a handler.

        Args:
            worker: a ProxycclWorker.
            stats: its ProxycclWorkerStats, where observers find the thread and its policy.
            on_exit: called in the thread when the engine returns for it.
            on_lost: called instead if an error has ended the thread, which then no longer runs the worker.
            idle: the policy that the worker needs; None for the thread's own.
        """
        with self._changed:
            if self._error is None:
                self._on_lost[int(ffi.cast("uintptr_t", worker))] = on_lost
            else:
                on_lost(self._error)
                return
            self._on_exit[int(ffi.cast("uintptr_t", worker))] = on_exit
            stats.thread = self.native_id
            self._served[int(ffi.cast("uintptr_t", worker))] = idle or self._default, stats
            self._choose_idle()
            lib.proxyccl_thread_add_worker(self._pointer, worker)
            self._changed.notify()

    def _choose_idle(self) -> None:
        """Gives the thread the most awake policy of its workers, and tells observers."""
        self._idle = IdlePolicy.most_awake([idle for idle, _ in self._served.values()] or [self._default])
        policy = _policy(self._idle)
        lib.proxyccl_thread_set_idle(self._pointer, policy)
        for _, stats in self._served.values():
            stats.spin_ns, stats.yield_ns, stats.max_sleep_ns = policy.spin_ns, policy.yield_ns, policy.max_sleep_ns

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
                runs_on = reason == lib.PROXYCCL_EXIT_HANDLER
                on_exit = self._on_exit[worker] if runs_on else self._on_exit.pop(worker)
                on_lost = self._on_lost[worker] if runs_on else self._on_lost.pop(worker)
                if not runs_on:
                    del self._served[worker]
                    self._choose_idle()
            try:
                on_exit(reason, info)
            except BaseException as error:
                if not runs_on:  # it is not among the remaining ones
                    on_lost(error)
                raise

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            lost = list(self._on_lost.values())
            self._on_exit.clear()
            self._on_lost.clear()
            self._served.clear()
        for on_lost in lost:
            on_lost(error)

    def close(self, timeout: float) -> bool:
        """Ends the thread when it has no more workers. False if that did not happen in time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if not self.is_current:
            self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        pointer = vars(self).pop("_pointer", None)  # gone: a later call fails in Python, not in C
        if pointer is not None:
            lib.proxyccl_thread_destroy(pointer)  # not at this object's end: the thread may be in it then
        return True
