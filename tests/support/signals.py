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
"""Not SIGUSR1, because the library handles it, and Python could not restore the library's handler."""


class Interrupt(BaseException):
    """The exception that a handler raises, as Python raises KeyboardInterrupt for Ctrl-C."""


def interrupt() -> None:
    """Raises `Interrupt`, as a signal handler."""
    raise Interrupt


@contextlib.contextmanager
def handled(handler: Callable[[], object]) -> Iterator[None]:
    """Installs a handler for the signal `NUMBER` during the `with` block.
    Collects garbage before the block and disables collection during the block, because Python ignores a handler's
    exception inside a finalizer or a weak reference's callback.
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
    """Sends this process a signal soon after the `with` block begins, and handles the signal by `handler`. Yields a
    list of the times of the handler's calls.
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
