"""Opens a runtime, or a vendor's driver or compiler, by name.

Each vendor's module is imported only when it is needed, so other vendors' packages need not be installed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading

from proxyccl.device.driver import Compiler, Driver
from proxyccl.device.errors import ArgumentError, RuntimeUnavailableError
from proxyccl.device.process import forks
from proxyccl.device.runtime import Runtime

_GPUS = ("cuda", "hip")
RUNTIMES = ("host", *_GPUS)
_NVIDIA_DRIVER = "libcuda.so.1"  # the name by which cuda-bindings loads the library
_AMD_NODES = ("/dev/kfd", "/dev/dxg")
"""The device files of AMD's kernel driver on Linux and in WSL."""

# If two threads import a module concurrently and the import fails, the second thread sees a half-initialised module.
_opening = threading.RLock()
forks.hold_while_forking(_opening)


def _require_gpu(name: str) -> None:
    if name not in _GPUS:
        raise ArgumentError("name", f"unknown GPU runtime {name!r}; expected one of {', '.join(_GPUS)}")


def open_driver(name: str) -> Driver:
    """Opens the driver of a GPU runtime, "cuda" or "hip".

    Raises:
        ArgumentError: the name is unknown.
        RuntimeUnavailableError: this machine does not offer the runtime; the message says what is missing.
    """
    _require_gpu(name)
    with _opening:
        return _driver(name)


@functools.cache
def _driver(name: str) -> Driver:
    if name == "cuda":
        from proxyccl.device.gpu.cuda import CudaDriver

        return CudaDriver()
    from proxyccl.device.gpu.hip import HipDriver

    return HipDriver()


def open_compiler(name: str) -> Compiler:
    """Opens the run-time compiler of a GPU runtime, "cuda" or "hip". Needs no device.

    Raises:
        ArgumentError: the name is unknown.
        RuntimeUnavailableError: this machine does not offer the runtime; the message says what is missing.
    """
    _require_gpu(name)
    with _opening:
        if name == "cuda":
            from proxyccl.device.gpu.cuda_compiler import CudaCompiler

            return CudaCompiler()
        from proxyccl.device.gpu.hip_compiler import HipCompiler

        return HipCompiler()


def find_runtime() -> str:
    """Returns the default runtime: the runtime of the first GPU vendor with a device on this machine, else "host"."""
    with _opening:
        return _first_with_a_device()


@functools.cache
def _first_with_a_device() -> str:
    for name in _GPUS:
        try:
            if _has_a_driver(name) and _driver(name).device_count() > 0:
                return name
        except RuntimeUnavailableError:
            continue
    return "host"


def _has_a_driver(name: str) -> bool:
    """Whether the vendor's driver is installed. Without a driver, the vendor's packages are not imported, because
    importing takes longer than making a communicator.
    """
    if name == "hip":
        return any(os.path.exists(node) for node in _AMD_NODES)
    try:
        ctypes.CDLL(_NVIDIA_DRIVER)
    except OSError:
        return False
    return True


def open_runtime(name: str | None = None, device: int | None = None, *, local_rank: int = 0) -> Runtime:
    """Opens a runtime.

    Args:
        name: "host", "cuda" or "hip"; None for ``PROXYCCL_RUNTIME``, else `find_runtime()`.
        device: the device's number. None means GPU number `local_rank` modulo the number of GPUs.
        local_rank: the number of this rank among the ranks of this machine.

    Raises:
        ArgumentError: the runtime or the device is unknown.
        RuntimeUnavailableError: this machine does not offer the runtime; the message says what is missing.
    """
    chosen = _chosen(name)
    if chosen == "host":
        from proxyccl.device.host import HostRuntime

        return HostRuntime(0 if device is None else device)
    from proxyccl.device.gpu.runtime import GpuRuntime

    driver = open_driver(chosen)
    return GpuRuntime(driver, device if device is not None else local_rank % max(1, driver.device_count()))


def require_suspendable(runtime: Runtime | str | None) -> None:
    """Raises RuntimeUnavailableError if a runtime's memory can't be suspended (`BaseRuntime.suspend`). Takes a runtime,
    or a name as `open_runtime` does, and raises the errors of `open_runtime`.
    """
    name = _chosen(runtime) if isinstance(runtime, str | None) else runtime.name
    if name != "host" and open_driver(name).blocks is None:
        raise RuntimeUnavailableError(f"suspendable: memory of {name} can't be suspended; expected suspendable=False")


def _chosen(name: str | None) -> str:
    if not isinstance(name, str | None):
        raise ArgumentError("runtime", f"must be a name or None, not {name!r}")
    chosen = name or os.environ.get("PROXYCCL_RUNTIME") or find_runtime()
    if chosen not in RUNTIMES:
        raise ArgumentError("runtime", f"unknown runtime {chosen!r}; expected one of {', '.join(RUNTIMES)}")
    return chosen
