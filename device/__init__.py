"""The device's side: headers that kernels include, kernels that ship, and the runtimes that run them.

It knows nothing of ranks.
"""

from __future__ import annotations

import os

from proxyccl.device.errors import ArgumentError, RuntimeUnavailableError
from proxyccl.device.runtime import Runtime

RUNTIMES = ("host", "cuda", "hip")


def open_runtime(name: str | None = None, device: int = 0) -> Runtime:
    """Opens a runtime by name, or the one in ``PROXYCCL_RUNTIME``, or the host's.

    Raises:
        ArgumentError: there is no runtime of that name.
        RuntimeUnavailableError: this machine does not offer it; the message says what is missing.
    """
    chosen = name or os.environ.get("PROXYCCL_RUNTIME") or "host"
    if chosen not in RUNTIMES:
        raise ArgumentError("runtime", f"{chosen!r} is none of {', '.join(RUNTIMES)}")
    if chosen != "host":
        raise RuntimeUnavailableError(f"the {chosen} runtime is not part of this version")
    from proxyccl.device.host import HostRuntime

    return HostRuntime(device)
