"""A thread that runs workers of the engine; the workers may belong to one service or to many services.

The thread enters the C engine without the GIL, and stays there until the engine returns for one of the thread's
workers. This module does not know about services: the caller that adds a worker passes the function to call when the
engine returns for this worker.
"""

from __future__ import annotations

import numbers
import os
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from proxyccl.device.errors import ArgumentError, ResourceError
from proxyccl.device.memory.shared_memory import SharedMemory
from proxyccl.device.process.cores import cores_allowed
from proxyccl.device.process.threads import Thread
from proxyccl.device.runtime import DriverCalls
from proxyccl.proxy import _engine

ffi, lib = _engine.ffi, _engine.lib

LONGEST_US = 1e9
"""The longest time of an `IdlePolicy`, in µs."""

OnExit = Callable[[int, "_engine.ProxycclExitInfoPointer"], None]
"""A function that is called in the thread with a ProxycclOutcome and a ProxycclExitInfo, which is valid only during the
call.
"""


@dataclass(frozen=True)
class IdlePolicy:
    """How a thread waits while the rings of all its workers are empty.

    The thread first spins, then yields, then sleeps for 1/32 of the time for which it has been idle, so it finds new
    work at most 1/32 of the idle time late. While transfers are under way, the thread yields for 1.6 ms before it
    sleeps, because waking up from a short sleep takes as long as the sleep itself. After a long idle time, the thread
    sleeps for 1/1024 of the idle time, at most 10 ms, even if `max_sleep_us` is shorter; after 10 s it uses 0.1 % of a
    core. ProxyCCL wakes a sleeping thread before each of its own launches. When another library replays a CUDA graph,
    nothing wakes the thread, so it finds the work when its sleep ends.

    The defaults suit machines with few cores. If there are enough cores, a proxy without an explicit policy uses
    `where_cores_suffice`.

    Attributes:
        spin_us: how long the thread polls without a pause; after 50 µs it yields its core between polls, so that other
            threads on the core need not wait for a whole time slice. If there are fewer cores than threads, a host
            kernel may wait up to `spin_us` for the core after each trigger that it pushes.
        yield_us: how long, after spinning, the thread yields the core between two polls.
        max_sleep_us: the longest sleep between two polls, unless the thread has been idle for long. Sleeping delays the
            thread's work by at most this time, plus the time that the system needs to wake the thread.

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
            object.__setattr__(self, name, float(value))  # messages can't encode NumPy's numbers

    @classmethod
    def always_awake(cls) -> IdlePolicy:
        """Returns a policy with which threads never sleep while a communicator is open. Each thread finds work
        immediately, but occupies a core.
        """
        return cls(yield_us=LONGEST_US, max_sleep_us=50.0)

    @classmethod
    def where_cores_suffice(cls) -> IdlePolicy:
        """Returns a policy with which a thread sleeps at most 50 µs at a time until it has been idle for 50 ms,
        which takes about a tenth of a core.
        """
        return cls(max_sleep_us=50.0)

    def __str__(self) -> str:
        if self.yield_us == LONGEST_US:
            return "always awake"
        return f"longest sleep {self.max_sleep_us:g} µs"

    @property
    def times(self) -> tuple[float, float, float]:
        """The policy's fields, in order."""
        return self.spin_us, self.yield_us, self.max_sleep_us

    @staticmethod
    def most_awake(policies: Iterable[IdlePolicy]) -> IdlePolicy:
        """Returns a policy with which a thread wakes up no later than with any of `policies`, which must not be
        empty.
        """
        each = list(policies)
        return IdlePolicy(
            max(policy.spin_us for policy in each),
            max(policy.yield_us for policy in each),
            min(policy.max_sleep_us for policy in each),
        )


def choose_idle(cores: int, programs: int, threads: int, within: tuple[int, int] | None = None) -> IdlePolicy:
    """Chooses the idle policy of proxy threads that share cores with programs.

    A program may spin while it waits for its GPU, and a thread spins while it has work, so each program and each thread
    needs a core.

    Args:
        cores: cores that the programs and the threads may run on.
        programs: number of this machine's ranks that use the threads.
        threads: number of threads of all these ranks' proxies.
        within: the number of programs and the number of threads that share the CPU quota of this process's container;
            None if all share it.
    """
    allowed = cores_allowed()
    suffice = cores >= programs + threads and (allowed is None or allowed >= sum(within or (programs, threads)))
    return IdlePolicy.where_cores_suffice() if suffice else IdlePolicy()


def created(pointer: Any, what: str) -> Any:
    """Returns `pointer`, which a constructor of the engine returned. Raises ResourceError if the pointer is null;
    `what` describes the object in the error.
    """
    if not pointer:
        raise ResourceError(f"there is no memory for {what}")
    return pointer


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


class _Served(NamedTuple):
    """A worker that a thread runs. The fields are arguments of `ProxyThread.add`."""

    on_exit: OnExit
    on_lost: Callable[[BaseException], None]
    idle: IdlePolicy
    stats: _engine.ProxycclWorkerStatsPointer


class ProxyThread:
    """A thread that runs its workers round-robin, and waits while it has no workers.

    Args:
        name: the thread's name.
        idle: the idle policy for workers that are added without a policy.
        cores: numbers of the cores that the thread may run on; None for all cores of its process.
        begin: called in the thread before the thread runs workers.
        functions: the functions of a runtime whose kernels may help to run the workers while the kernels wait; None if
            kernels do not help.

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
        self._served: dict[int, _Served] = {}  # maps a worker's address to the worker
        # The word with which a launch in any process wakes the thread (waking.h).
        self.asleep = SharedMemory.allocate(ffi.sizeof("uint32_t"))
        made = lib.proxyccl_thread_create(_policy(idle), ffi.cast("uint32_t *", self.asleep.ptr))
        self._pointer = created(made, "a thread of the proxy")
        if functions is not None and functions.add_helper:
            add, remove = ffi.cast("void *", functions.add_helper), ffi.cast("void *", functions.remove_helper)
            lib.proxyccl_thread_take_help(self._pointer, add, remove)
        self._begin = begin
        self._cores = cores
        self._changed = threading.Condition()
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
        return self._thread is threading.current_thread()

    @property
    def name(self) -> str:
        return self._thread.name

    @property
    def native_id(self) -> int:
        number = self._thread.native_id
        assert number is not None
        return number

    @property
    def idle(self) -> IdlePolicy:
        """The idle policy in force: the most aggressive policy of the thread's workers, or the thread's own policy
        if it has no workers.
        """
        return self._idle

    def add(
        self,
        worker: _engine.ProxycclWorkerPointer,
        stats: _engine.ProxycclWorkerStatsPointer,
        on_exit: OnExit,
        on_lost: Callable[[BaseException], None] = lambda _: None,
        idle: IdlePolicy | None = None,
    ) -> None:
        """Makes the thread run a worker until the worker ends.

        Args:
            worker: a ProxycclWorker.
            stats: the worker's ProxycclWorkerStats, where observers find the thread and its policy.
            on_exit: called in the thread when the engine returns for the worker.
            on_lost: called instead of `on_exit` if an error has ended the thread and therefore its workers.
            idle: the policy that the worker requires; None for the thread's own policy.
        """
        with self._changed:
            if self._error is not None:
                on_lost(self._error)
                return
            stats.thread = self.native_id
            self._served[int(ffi.cast("uintptr_t", worker))] = _Served(on_exit, on_lost, idle or self._default, stats)
            self._choose_idle()
            lib.proxyccl_thread_add_worker(self._pointer, worker)
            self._changed.notify()

    def _choose_idle(self) -> None:
        self._idle = IdlePolicy.most_awake([served.idle for served in self._served.values()] or [self._default])
        policy = _policy(self._idle)
        lib.proxyccl_thread_set_idle(self._pointer, policy)
        for served in self._served.values():
            stats = served.stats
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
                    self._changed.wait_for(lambda: self._served or self._closing)
                    if not self._served:
                        return
                continue
            worker = int(ffi.cast("uintptr_t", info.worker))
            with self._changed:
                runs_on = reason == lib.PROXYCCL_EXIT_HANDLER
                served = self._served[worker]
                if not runs_on:
                    del self._served[worker]
                    self._choose_idle()
            try:
                served.on_exit(reason, info)
            except BaseException as error:
                if not runs_on:  # the worker is not in _served, so _fail will not call on_lost
                    served.on_lost(error)
                raise

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            lost, self._served = self._served, {}
        for served in lost.values():
            served.on_lost(error)

    def close(self, timeout: float) -> bool:
        """Ends the thread once it has no workers. Returns False if the thread did not end in time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if not self.is_current:
            self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        pointer = vars(self).pop("_pointer", None)  # later calls raise AttributeError
        if pointer is not None:
            lib.proxyccl_thread_destroy(pointer)  # __del__ can't do this, because the thread may still use the pointer
        return True
