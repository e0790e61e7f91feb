"""Refuses concurrent calls by threads of one rank, for calls that all ranks must make in the same order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator

from proxyccl.device.errors import ConcurrentCallError


class OneCaller:
    """A lock that raises an error, instead of waiting, if another thread holds it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callers: dict[Hashable, str] = {}  # the calling thread's name, by `about`

    @contextlib.contextmanager
    def only(self, call: str, about: Hashable = None) -> Iterator[None]:
        """Returns a context in which the caller must make the whole call.

        Args:
            call: the call's name, for the error.
            about: the object on which the call works; calls on different objects may run concurrently.

        Raises:
            ConcurrentCallError: another thread is in a call with the same `about`.
        """
        with self._lock:
            caller = self._callers.get(about)
            if caller is not None:
                raise ConcurrentCallError(
                    f"{call}: thread {caller} of this rank is in such a call; make these calls in one thread at a time"
                )
            self._callers[about] = threading.current_thread().name
        try:
            yield
        finally:
            with self._lock:
                del self._callers[about]
