"""Makes a GPU's context current for driver calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from proxyccl.device.driver import Driver


class DeviceContext:
    """A device's primary context.

    Finalizers hold this object instead of the runtime, so that the runtime can be collected.

    Args:
        driver: the vendor's driver.
        device: the number of the device among those that this process may use.
    """

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver, self.device = driver, device
        self.handle = driver.context(device)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Makes the device current within a `with` block. The block may make calls that another thread's graph capture
        would forbid.
        """
        before = self.driver.current()
        if before != self.handle:
            self.driver.make_current(self.handle)
        mode = self.driver.relax_capture()
        try:
            yield
        finally:
            self.driver.relax_capture(mode)
            if before not in (None, self.handle):
                self.driver.make_current(before)

    def call(self, call: Callable[..., Any], *args: Any) -> Any:
        """Makes the device current, calls `call(*args)` and returns the result."""
        with self.current():
            return call(*args)
