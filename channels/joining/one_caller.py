"""Calls that only one thread of a rank may make at a time, because all ranks make these calls together, in the same
order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Hashable, Iterator

from proxyccl.device.errors import ConcurrentCallError


class OneCaller:
    """Refuses a call while another thread is in a call about the same subject."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callers: dict[Hashable, str] = {}  # by subject, the name of the thread in a call

    @contextlib.contextmanager
    def only(self, call: str, about: Hashable = None) -> Iterator[None]:
        """Returns a context in which the call runs.

        Args:
            call: the call's name.
            about: the call's subject: calls about different subjects may run concurrently.

        Raises:
            ConcurrentCallError: another thread is in a call about the same subject.
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
