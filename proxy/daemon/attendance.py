"""The users of a job's own daemon, and so the moment when its work is done."""

from __future__ import annotations

import math
import os
import time

START_SECONDS = 30.0
"""Seconds that a daemon waits for its first client, while the rank that started it lives."""
LINGER_SECONDS = 1.0
"""Seconds that it waits for the next client while a process of an earlier one lives."""


class Attendance:
    """The live processes that were clients, by their descriptors, and the time since nobody is connected.

    Args:
        starter: the process that starts the daemon, and is to be a client.
    """

    def __init__(self, starter: int) -> None:
        self._pids: dict[int, int] = {}  # by descriptor
        self._anybody_came = False
        self._empty_since: float | None = time.monotonic()
        self._add(starter)

    @property
    def descriptors(self) -> list[int]:
        """The descriptors of the processes. One becomes readable when its process ends."""
        return list(self._pids)

    def came(self, pid: int) -> int | None:
        """Notes that a process has connected. Returns its descriptor if it is new and lives."""
        self._anybody_came = True
        return self._add(pid)

    def _add(self, pid: int) -> int | None:
        if pid in self._pids.values():
            return None
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:  # it has ended already, or lives in another namespace of process ids
            return None
        self._pids[descriptor] = pid
        return descriptor

    def ended(self, descriptor: int) -> int:
        """Forgets a process that has ended. Returns its process id."""
        os.close(descriptor)
        return self._pids.pop(descriptor)

    def milliseconds_left(self, clients: int) -> int | None:
        """The time to wait for another client; None while there are some.

        Args:
            clients: the number connected.
        """
        if clients:
            self._empty_since = None
            return None
        now = time.monotonic()
        if self._empty_since is None:
            self._empty_since = now
        patience = LINGER_SECONDS if self._anybody_came else START_SECONDS
        if not self._pids:
            patience = 0.0
        return max(0, math.ceil(1000 * (self._empty_since + patience - now)))

    def close(self) -> None:
        """Closes the descriptors."""
        for descriptor in self.descriptors:
            self.ended(descriptor)
