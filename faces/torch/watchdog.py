"""A thread of the process that reports the oldest call in progress when a process group fails, and records the calls.

A failure shows in the next call, or where a Work is waited for. A program that waits elsewhere, such as for its device,
would learn nothing.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import Protocol

from proxyccl.device.process import forks
from proxyccl.device.process.threads import Thread
from proxyccl.torch.endpoints import Endpoints
from proxyccl.torch.flight_recorder import write_failure

_INTERVAL_SECONDS = 0.5
_logger = logging.getLogger("proxyccl.torch")


class Watched(Protocol):
    """A process group."""

    def oldest_call(self) -> str:
        """Its oldest call that has not ended, in words, with its number and the rank's."""
        ...

    @property
    def endpoints(self) -> Endpoints:
        """Its communicators."""
        ...


_lock = threading.Lock()
forks.hold_while_forking(_lock)
_watched: weakref.WeakSet[Watched] = weakref.WeakSet()
_thread: Thread | None = None


def watch(group: Watched) -> None:
    """Watches a process group as long as it exists."""
    global _thread  # noqa: PLW0603  one thread for the process
    with _lock:
        _watched.add(group)
        if _thread is None or not _thread.is_alive():
            thread = Thread(_run, "proxyccl-torch-watchdog")
            thread.start()
            _thread = thread


def _run() -> None:
    reported: weakref.WeakSet[Watched] = weakref.WeakSet()
    while True:
        time.sleep(_INTERVAL_SECONDS)
        _look(reported)


def _look(reported: weakref.WeakSet[Watched]) -> None:
    """Reports the groups that failed after the last look. A function of its own: no frame then holds a group while the
    watchdog sleeps."""
    with _lock:
        groups = [group for group in _watched if group not in reported]
    for group in groups:
        try:
            oldest = group.oldest_call()
            comm = group.endpoints.failed
            if comm is not None:
                reported.add(group)
                write_failure()
                _logger.error("%s: %s", oldest, comm.group.failure.exception())
        except Exception:  # the other groups are still watched
            reported.add(group)
            _logger.exception("a process group is no longer watched")
