"""When memory of the host may be unpinned: not while kernels of another device may wait for this process."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import AbstractContextManager

Device = tuple[str, int]
"""A runtime's name, and the device's number there."""


class PinHolds:
    """Counts the holds of each device. A hold says that kernels of the device may wait for work of this process.

    CUDA's call that unpins (`cuMemHostUnregister`) waits for the kernels of all devices of the process, as seen with
    driver 580. One of these may wait for a launch of the thread that made the call, or for a proxy's copy that waits
    for the driver. So memory without users stays pinned while other devices have holds.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # garbage may be collected, and memory freed, anywhere
        self._holds: Counter[Device] = Counter()

    def unchanged(self) -> AbstractContextManager[object]:
        """Within the block no other thread begins or ends a hold: who decides to unpin does so inside."""
        return self._lock

    def begin(self, device: Device) -> None:
        """A device's hold begins. Each call is paired with an `end`."""
        with self._lock:
            self._holds[device] += 1

    def end(self, device: Device) -> None:
        """It has ended, and so have the kernels."""
        with self._lock:
            self._holds[device] -= 1
            self._holds = +self._holds

    def elsewhere(self, device: Device) -> bool:
        """Whether another device has a hold."""
        with self._lock:
            return any(other != device for other in self._holds)
