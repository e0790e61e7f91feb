"""Calls that only one thread of a rank may make at a time, because ranks make them together and in the same order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator

from proxyccl.device.errors import ConcurrentCallError


class OneCaller:
    """Refuses a call that another thread is in."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callers: dict[Hashable, str] = {}  # names of threads

    @contextlib.contextmanager
    def only(self, call: str, about: Hashable = None) -> Iterator[None]:
        """Around a call.

        Args:
            call: its name.
            about: its subject: calls about different subjects may run concurrently.

        Raises:
            ConcurrentCallError: a thread is in a call about the same.
        """
        with self._lock:
            caller = self._callers.get(about)
            if caller is not None:
                raise ConcurrentCallError(
                    f"{call}: thread {caller} of this rank is in such a call; expected one thread at a time"
                )
            self._callers[about] = threading.current_thread().name
        try:
            yield
        finally:
            with self._lock:
                del self._callers[about]
