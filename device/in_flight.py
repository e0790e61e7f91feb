"""Keeps what queued work uses alive until the work is done."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxyccl.device.runtime import Event, Runtime

_BATCH = 16


class InFlight:
    """References to the arguments of launches, let go in batches as their streams get past them.

    An event behind each batch tells when: one event for several launches keeps a launch cheap.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = weakref.proxy(runtime)  # the runtime owns this object
        self._lock = threading.Lock()
        self._open: dict[int, list[object]] = {}
        self._batches: deque[tuple[Event, list[object]]] = deque()

    def add(self, kept: object, stream: int) -> None:
        """Keeps an object until what is now queued on the stream with this handle is done."""
        with self._lock:
            batch = self._open.setdefault(stream, [])
            batch.append(kept)
            # An event that is captured into a graph never comes by itself; the batch waits for a later launch.
            if len(batch) < _BATCH or self._runtime.is_capturing(stream):
                return
            event = self._runtime.create_event()
            event.record(stream)
            self._batches.append((event, self._open.pop(stream)))
            # Each batch is looked at in turn; those of a stream that is behind go to the back.
            for _ in range(len(self._batches)):
                waiting = self._batches.popleft()
                if not waiting[0].query():
                    self._batches.append(waiting)

    def take(self) -> object:
        """Hands over all that is kept now, for a caller that waits for all streams before it lets that go."""
        with self._lock:
            taken = (self._open, self._batches)
            self._open, self._batches = {}, deque()
            return taken
