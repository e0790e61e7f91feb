"""When a rank may unpin memory of the host: not while ranks of other devices have open groups in this process."""

from __future__ import annotations

import threading
from collections import Counter

Device = tuple[str, int]
"""A runtime's name, and the device's number there."""


class PinHolds:
    """Counts the open groups of each device.

    CUDA's call that unpins (`cuMemHostUnregister`) waits for the kernels of all devices of the process, as seen with
    driver 580. One of these may wait for a launch of the thread that made the call, or for a proxy's copy that waits
    for the driver. So memory without users stays pinned while groups of other devices are open.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # garbage may be collected, and memory freed, anywhere
        self._groups: Counter[Device] = Counter()

    def begin(self, device: Device) -> None:
        """A group of a device begins. Each call is paired with an `end`."""
        with self._lock:
            self._groups[device] += 1

    def end(self, device: Device) -> None:
        """It has ended, and so have its kernels."""
        with self._lock:
            self._groups[device] -= 1
            self._groups = +self._groups

    def elsewhere(self, device: Device) -> bool:
        """Whether another device has an open group."""
        with self._lock:
            return any(other != device for other in self._groups)
