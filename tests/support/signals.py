"""Runs signal handlers in tests; Python runs them in the main thread."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

NUMBER = signal.SIGUSR2
"""SIGUSR1 is the library's own, whose handler Python does not know, and could not restore."""


class Interrupt(BaseException):
    """The exception of a handler, like KeyboardInterrupt for Ctrl-C."""


def interrupt() -> None:
    """Raises `Interrupt`; a handler for tests."""
    raise Interrupt


@contextlib.contextmanager
def handled(handler: Callable[[], object]) -> Iterator[None]:
    """Installs a handler for the signal `NUMBER` during the block.
    Garbage of earlier tests is collected before the block, and collection is off during it, because Python ignores an
    exception of a handler that runs in a weak reference's callback or in a finalizer.
    """
    gc.collect()
    gc.disable()
    before = signal.signal(NUMBER, lambda _number, _frame: handler())
    try:
        yield
    finally:
        signal.signal(NUMBER, before)
        gc.enable()


@contextlib.contextmanager
def handling(handler: Callable[[], object]) -> Iterator[list[float]]:
    """Sends this process a signal soon after the block begins, and calls `handler` for it. Yields the times of the
    calls.
    """
    times: list[float] = []

    def handle() -> None:
        times.append(time.monotonic())
        handler()

    timer = threading.Timer(0.15, os.kill, (os.getpid(), NUMBER))
    with handled(handle):
        timer.start()
        try:
            yield times
        finally:
            timer.join()
