"""Keeps arrays alive while asynchronous work uses them."""

from __future__ import annotations

from collections import deque

from proxyccl.device.runtime import Event, Runtime, StreamLike

_BATCH = 64


class InFlight:
    """References to the arrays of queued collectives, let go in batches as the streams get past them.

    An event behind each batch tells when; one event for many launches keeps a launch cheap.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._open: list[tuple[object, ...]] = []
        self._batches: deque[tuple[Event, list[tuple[object, ...]]]] = deque()

    def add(self, owners: tuple[object, ...], stream: StreamLike) -> None:
        """Keeps `owners` until what is now queued on the stream is done. Launches follow one another on all streams."""
        self._open.append(owners)
        if len(self._open) < _BATCH:
            return
        event = self._runtime.create_event()
        event.record(stream)
        self._batches.append((event, self._open))
        self._open = []
        while self._batches and self._batches[0][0].query():
            self._batches.popleft()

    def clear(self) -> None:
        """Lets everything go; all streams were waited for."""
        self._open.clear()
        self._batches.clear()
