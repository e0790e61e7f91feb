"""AMD's driver and run-time compiler as a `Driver`."""

from __future__ import annotations

from proxyccl.device.driver import Driver
from proxyccl.device.errors import RuntimeUnavailableError


def HipDriver() -> Driver:  # noqa: N802
    """Refuses."""
    raise RuntimeUnavailableError("the hip runtime is not part of this version")
