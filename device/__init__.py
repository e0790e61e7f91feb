"""The device's side: headers that kernels include, kernels that ship, and the runtimes that run them.

It knows nothing of ranks.
"""

from __future__ import annotations

import functools
import os
import threading

from proxyccl.device.driver import Compiler, Driver
from proxyccl.device.errors import ArgumentError, RuntimeUnavailableError
from proxyccl.device.runtime import Runtime

RUNTIMES = ("host", "cuda", "hip")


# A module that fails to import must not be imported by two threads at once: the second would see it half made.
_opening = threading.RLock()


def open_driver(name: str) -> Driver:
    """The driver of a GPU runtime, "cuda" or "hip".

    Raises:
        RuntimeUnavailableError: this machine does not offer it; the message says what is missing.
    """
    with _opening:
        return _driver(name)


@functools.cache
def _driver(name: str) -> Driver:
    if name == "cuda":
        from proxyccl.device.cuda import CudaDriver

        return CudaDriver()
    from proxyccl.device.hip import HipDriver

    return HipDriver()


def open_compiler(name: str) -> Compiler:
    """The run-time compiler of a GPU runtime, "cuda" or "hip". It needs no device.

    Raises:
        RuntimeUnavailableError: this machine does not offer it; the message says what is missing.
    """
    with _opening:
        if name == "cuda":
            from proxyccl.device.cuda import CudaCompiler

            return CudaCompiler()
        from proxyccl.device.hip import HipCompiler

        return HipCompiler()


def find_runtime() -> str:
    """The runtime that is used where none is named: that of the first GPU vendor with a device here, else "host"."""
    with _opening:
        return _first_with_a_device()


@functools.cache
def _first_with_a_device() -> str:
    for name in ("cuda", "hip"):
        try:
            if _driver(name).device_count() > 0:
                return name
        except RuntimeUnavailableError:
            continue
    return "host"


def open_runtime(name: str | None = None, device: int | None = None, *, local_rank: int = 0) -> Runtime:
    """Opens a runtime by name, or the one in ``PROXYCCL_RUNTIME``, or what this machine offers.

    Args:
        name: "host", "cuda" or "hip"; None for ``PROXYCCL_RUNTIME``, else `find_runtime()`.
        device: device number; None for `local_rank`, going round where there are fewer devices.
        local_rank: number of this rank among those of this host.

    Raises:
        ArgumentError: there is no runtime or no device of that name or number.
        RuntimeUnavailableError: this machine does not offer it; the message says what is missing.
    """
    chosen = name or os.environ.get("PROXYCCL_RUNTIME") or find_runtime()
    if chosen not in RUNTIMES:
        raise ArgumentError("runtime", f"{chosen!r} is none of {', '.join(RUNTIMES)}")
    if chosen == "host":
        from proxyccl.device.host import HostRuntime

        return HostRuntime(device or 0)
    from proxyccl.device.gpu import GpuRuntime

    driver = open_driver(chosen)
    return GpuRuntime(driver, device if device is not None else local_rank % max(1, driver.device_count()))
