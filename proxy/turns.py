"""Checks whether a proxy's workers take turns. Waiting threads call this, because the workers' process may be stopped
or a driver call may hang.

A worker counts its turns in shared memory (engine/schedule.h), so the check costs the proxy nothing.
"""

from __future__ import annotations

import time
from typing import Any

from proxyccl.proxy._engine import lib

_LONGEST_STEP = 0.25
"""Seconds that one check counts at most: if the checking process was stopped too, that does not count against the
workers."""


class TurnWatch:
    """Measures how long a waiter has waited while a worker took no turn. Used by one thread, which checks every few
    milliseconds.

    Args:
        schedule_words: the ProxycclScheduleWords that the workers count in.
        workers: number of workers.
    """

    def __init__(self, schedule_words: Any, workers: int) -> None:
        self._words = schedule_words
        self._counts = [0] * workers
        self._idle = [0.0] * workers
        self._looked = time.monotonic()

    def look(self, *, awaited: bool = True) -> float:
        """The longest time, in seconds, for which a worker that has not ended has taken no turn.

        Args:
            awaited: whether a stream is waiting; otherwise the measured time restarts at 0.
        """
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, _LONGEST_STEP), now
        for worker, before in enumerate(self._counts):
            self._counts[worker] = count = self._words.turns[worker].count
            idles = awaited and count == before and count != lib.PROXYCCL_NO_MORE_TURNS
            self._idle[worker] = self._idle[worker] + passed if idles else 0.0
        return max(self._idle)

    def look_for_streams(self) -> float:
        """Like `look`, but returns 0 unless a stream waits for a schedule."""
        return self.look(awaited=bool(self._words.bell or self._words.running))
