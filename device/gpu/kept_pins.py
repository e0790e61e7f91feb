"""Pinned memory without users, in a process with ranks on several devices."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable

_MOST_BYTES = 1 << 30

Unpin = Callable[[], None]


class KeptPins:
    """Unpins memory when no kernel of another rank of this process may wait for the rank that does.

    CUDA's call for it (`cuMemHostUnregister`) waits for the kernels of all devices of the process, as seen with driver
    580. One of these may wait for a launch of the thread that made the call. So while ranks of several devices have
    open groups, memory without users stays pinned: up to 1 GiB, beyond which the oldest is unpinned after all.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # garbage may be collected, and memory freed, anywhere
        self._ranks: Counter[tuple[str, int]] = Counter()
        self._kept: deque[tuple[int, Unpin]] = deque()
        self._nbytes = 0

    def begin_rank(self, runtime: str, device: int) -> None:
        """A rank of a device has opened a group. Each call is paired with an `end_rank`."""
        with self._lock:
            self._ranks[runtime, device] += 1

    def end_rank(self, runtime: str, device: int) -> None:
        """The group has ended, and none of its kernels runs. Unpins what was kept, if ranks of one device remain."""
        with self._lock:
            self._ranks[runtime, device] -= 1
            self._ranks = +self._ranks
        self._unpin()

    def release(self, nbytes: int, unpin: Unpin) -> None:
        """Unpins memory, now or later."""
        with self._lock:
            self._kept.append((nbytes, unpin))
            self._nbytes += nbytes
        self._unpin()

    def _unpin(self) -> None:
        while True:
            with self._lock:
                most = _MOST_BYTES if len(self._ranks) > 1 else -1
                if not self._kept or self._nbytes <= most:
                    return
                nbytes, unpin = self._kept.popleft()
                self._nbytes -= nbytes
            unpin()
