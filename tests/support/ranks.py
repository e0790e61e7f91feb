"""Ranks, each a thread, that run many cases of a test module on the same communicators. After a failure, the next run
makes new communicators.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from proxyccl import AbortedError, Communicator, Runtime, ThreadBootstrap
from proxyccl.device.gpu.unused_memory import UnusedMemory
from proxyccl.device.runtimes import open_runtime
from support.devices import RUNTIME, require_devices
from support.running import TIMEOUT

T = TypeVar("T")


class Ranks:
    """`world_size` communicators, each used by one thread.

    Args:
        world_size: number of ranks.
        make_runtime: returns a rank's runtime; by default the communicator opens one.
        options_of: returns a rank's own communicator options.
        options: communicator options of all ranks.
    """

    def __init__(
        self,
        world_size: int,
        *,
        make_runtime: Callable[[int], Runtime] | None = None,
        options_of: Callable[[int], dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        require_devices(world_size)
        self.world_size = world_size
        self._make_runtime = make_runtime or (lambda _: None)
        self.options_of = options_of or (lambda _: {})
        self._options = {"timeout": TIMEOUT, **options}
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"rank-{rank}") for rank in range(world_size)]
        self._communicators: list[Communicator] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        for thread in self._threads:
            thread.shutdown()

    def _close(self) -> None:
        communicators, self._communicators = self._communicators, []
        if communicators:
            self._everywhere(lambda rank: communicators[rank].close())

    def _open(self) -> None:
        bootstraps = ThreadBootstrap.create(self.world_size)
        self._communicators = self._everywhere(
            lambda rank: Communicator(
                bootstraps[rank], self._make_runtime(rank), **self._options, **self.options_of(rank)
            )
        )

    def _everywhere(self, action: Callable[[int], T]) -> list[T]:
        futures: list[Future[T]] = [thread.submit(action, rank) for rank, thread in enumerate(self._threads)]
        errors = [error for future in futures if (error := future.exception(4 * TIMEOUT)) is not None]
        for error in errors:  # prefer errors of other ranks, because AbortedError does not name the cause
            if not isinstance(error, AbortedError):
                raise error
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def run(self, body: Callable[[Communicator], T]) -> list[T]:
        """Runs body(communicator) on all ranks concurrently. Returns the results by rank, or raises the first rank's
        exception.
        """
        if not self._communicators:
            self._open()
        communicators = self._communicators

        def on_rank(rank: int) -> T:
            try:
                return body(communicators[rank])
            except BaseException as error:
                communicators[rank].abort(f"a test failed: {error}")
                raise

        try:
            return self._everywhere(on_rank)
        except BaseException:
            self._close()
            raise


class _Cycle:
    """An object that refers to itself, so that only the garbage collector frees it."""

    __slots__ = ("__weakref__", "itself")

    def __init__(self) -> None:
        self.itself = self


_COLLECTING = threading.Lock()


def collect_garbage() -> None:
    """Collects garbage until there is none, because finalizers make further objects garbage. `gc.collect` does nothing
    while another thread collects, so its effect is checked on a `_Cycle`. The lock prevents threads from collecting
    each other's `_Cycle` and starting again forever.
    """
    with _COLLECTING:
        while True:
            gone = weakref.ref(_Cycle())
            found = gc.collect()
            if gone() is not None:
                time.sleep(0.001)
            elif found == 1:
                return


def open_descriptors() -> int:
    """Collects garbage, then returns the number of this process's file descriptors."""
    collect_garbage()
    return len(os.listdir("/proc/self/fd"))


def live_threads() -> int:
    """Returns the number of this process's threads, including those that run no Python.

    Excludes the threads that run the host runtime's kernel blocks, because their number varies.
    """
    others = 0
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended since the glob
            others += path.read_text() != "proxyccl-blocks\n"
    return others


class Gate:
    """An event on which handlers can block. The end of the `with` block sets the event, even if the test fails."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def __enter__(self) -> Gate:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open()

    def open(self) -> None:
        """Releases all waiters."""
        self._open.set()

    def wait(self) -> None:
        """Waits until the gate is open, or for at most four times TIMEOUT."""
        self._open.wait(4 * TIMEOUT)


def _resources() -> tuple[int, int]:
    """Synchronises the devices, which frees the memory of collected objects. Then returns the numbers of this process's
    descriptors and threads.
    """
    for runtime, device in list(UnusedMemory._on):
        if runtime == RUNTIME:
            open_runtime(runtime, device).synchronize()
    return open_descriptors(), live_threads()


def settled() -> tuple[int, int]:
    """Returns the numbers of this process's descriptors and threads after they have stopped changing."""
    deadline, seen = time.monotonic() + TIMEOUT, [(-1, -1)]
    while len(set(seen[-10:])) > 1 or len(seen) < 10:
        assert time.monotonic() < deadline, f"descriptors and threads do not settle: {seen[-10:]}"
        seen.append(_resources())
        time.sleep(0.02)
    return seen[-1]


def settles(resources: tuple[int, int]) -> bool:
    """Waits until this process has at most `resources` (descriptors, threads). Returns False after a time-out."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        if all(now <= then for now, then in zip(_resources(), resources, strict=True)):
            return True
        time.sleep(0.02)
    return False
