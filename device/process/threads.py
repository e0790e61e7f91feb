"""Threads whose `start` raises ResourceError within a bounded time if memory or threads have run out. If an exception
ends a thread, it is logged and passed to the thread's owner.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

from proxyccl.device.errors import ResourceError

_BEGIN_SECONDS = 10.0
_logger = logging.getLogger("proxyccl")


class _Started(threading.Event):
    """The event that `threading.Thread.start` waits for, with a time-out: a thread that lacks memory to begin never
    sets the event (https://github.com/python/cpython/issues/140746).
    """

    def wait(self, timeout: float | None = None) -> bool:
        if not super().wait(_BEGIN_SECONDS if timeout is None else timeout):
            raise RuntimeError(f"the thread did not begin within {_BEGIN_SECONDS:g} s")
        return True


class Thread(threading.Thread):
    """A daemon thread, for which the process does not wait at exit.

    Args:
        run: the thread's function.
        name: the thread's name in debuggers and reports.
        arguments: the arguments of `run`.
        failed: a function that the thread calls with an exception of `run`, to end what depends on the thread.
    """

    def __init__(
        self,
        run: Callable[..., object],
        name: str,
        *arguments: Any,
        failed: Callable[[BaseException], object] | None = None,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._started = _Started()
        self._failed = failed
        self._lock = threading.Lock()  # guards `_call`, which a late thread and a start that gives up both take
        self._call: Callable[[], object] | None = functools.partial(run, *arguments)  # None once taken

    def start(self) -> None:
        """Starts the thread, and returns when it has begun to run.

        Raises:
            ResourceError: the thread did not begin, and will not call `run` later.
        """
        try:
            super().start()
        except (RuntimeError, MemoryError) as error:
            if self._take() is not None:
                reason = error if isinstance(error, RuntimeError) else "out of memory"
                raise ResourceError(f"can't start thread {self.name}: {reason}") from None

    def run(self) -> None:
        call = self._take()
        if call is None:
            return
        try:
            call()
        except BaseException as error:
            _logger.exception("the thread %s has failed", self.name)
            if self._failed is not None:
                self._failed(error)
        finally:
            self._failed = None  # drops the reference to the thread's owner

    def _take(self) -> Callable[[], object] | None:
        # Dropping `_call` frees the thread's arguments, because Python never frees a thread that did not begin.
        with self._lock:
            call, self._call = self._call, None
        return call
