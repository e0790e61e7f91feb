"""Notices that an error has ended this process's context on its GPU, which the driver reports only when asked."""

from __future__ import annotations

import time
from collections.abc import Callable

from proxyccl.device.driver import LOST_CONTEXT
from proxyccl.device.errors import DriverError
from proxyccl.device.runtime import Stream

INTERVAL = 0.25
"""Seconds between two queries."""


class ContextWatch:
    """Queries the driver from time to time.

    Args:
        stream: a stream of the context, to query; nothing else depends on it.
        lost: called with the driver's status.
    """

    def __init__(self, stream: Stream, lost: Callable[[int], None]) -> None:
        self._stream = stream
        self._lost = lost
        self._next = 0.0

    def look(self) -> None:
        """Queries the driver, if it is time again."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + INTERVAL
        try:
            self._stream.query()
        except DriverError as error:
            if error.status in LOST_CONTEXT:  # a driver that ends with the process returns errors of its own
                self._lost(error.status)
