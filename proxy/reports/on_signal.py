"""Makes a process write its reports at SIGUSR1, whatever its threads are doing."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable

from proxyccl.device.process.threads import Thread
from proxyccl.proxy._engine import lib

SIGNAL = signal.SIGUSR1
_COUNT_BYTES = 8
"""Bytes of an eventfd's count."""

_logger = logging.getLogger("proxyccl")
_lock = threading.Lock()
_tried = False


def install(report: Callable[[str], object]) -> None:
    """Makes the signal call `report` in a thread, with a text that names the cause.

    Does nothing if it was called before, or if the program handles or ignores the signal in Python. An existing handler
    in C, such as MPICH's, is still called.
    """
    global _tried  # noqa: PLW0603  the process has only one handler for the signal
    with _lock:
        if _tried:
            return
        _tried = True
        if signal.getsignal(SIGNAL) not in (signal.SIG_DFL, None):
            return
        descriptor = os.eventfd(0, os.EFD_CLOEXEC)
        if lib.proxyccl_wake_signal_install(SIGNAL, descriptor) != 0:
            os.close(descriptor)
            return
        # A forked child has the descriptor but not the thread, so the handler is removed.
        os.register_at_fork(after_in_child=lambda: lib.proxyccl_wake_signal_remove(SIGNAL))
        Thread(_wait, "proxyccl-signal", descriptor, report).start()


def _wait(descriptor: int, report: Callable[[str], object]) -> None:
    while True:
        os.read(descriptor, _COUNT_BYTES)  # os.eventfd_read, unlike os.read, does not retry after a signal
        try:
            report(f"signal {SIGNAL.name}")
        except Exception:  # the thread must not end, because it also handles later signals
            _logger.exception("no report on signal %s", SIGNAL.name)
