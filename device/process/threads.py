"""Threads of the library. Starting a thread takes a bounded time, and raises ResourceError if memory or threads have
run out. An error that ends a thread is logged, and passed to the thread's owner.
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
    """The event that `threading.Thread.start` waits for. A thread that lacks memory to begin never sets the event, and
    `start` has no time-out (https://github.com/python/cpython/issues/140746).
    """

    def wait(self, timeout: float | None = None) -> bool:
        if not super().wait(_BEGIN_SECONDS if timeout is None else timeout):
            raise RuntimeError(f"the thread did not begin within {_BEGIN_SECONDS:g} s")
        return True


class Thread(threading.Thread):
    """A daemon thread: the process does not wait for it when it ends.

    Args:
        run: the thread's function.
        name: the thread's name in debuggers and reports.
        arguments: the arguments of `run`.
        failed: called in the thread with an exception of `run`, which is also logged; it should end what depends on the
            thread.
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
        self._lock = threading.Lock()  # decides between a thread that begins late and a start that gives up
        self._call: Callable[[], object] | None = functools.partial(run, *arguments)  # until it begins or is abandoned

    def start(self) -> None:
        """Starts the thread, and returns when the thread has begun to run.

        Raises:
            ResourceError: the thread can't be started, and will not begin later.
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
            self._failed = None  # drops the reference to the owner of the thread

    def _take(self) -> Callable[[], object] | None:
        # Python keeps a thread that did not begin forever, but not the objects that it would have used.
        with self._lock:
            call, self._call = self._call, None
        return call
