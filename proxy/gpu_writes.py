"""The rule for RDMA into a GPU's memory: the GPU must keep the order of these writes and of signals in host memory.

A signal is a word in the receiver's control segment, which is host memory. The network adapter writes the data first
and then the word. But the two writes take different paths, and a kernel that has read the word may still read old data,
unless the GPU orders both writes. For a GPU that does not, the staged transports move the data through pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from proxyccl.device.errors import RuntimeUnavailableError
from proxyccl.device.runtime import Runtime

GPU_WRITES = ("auto", "ordered")
"""Values of the option `gpu_writes`: ask the device, or trust the caller that it keeps the order."""

_PROBE_BYTES = 4096

Registration = TypeVar("Registration")


def require_ordered(runtime: Runtime, gpu_writes: str, variable: str) -> None:
    """Refuses RDMA to and from a GPU that does not order the writes.

    Args:
        runtime: the GPU's runtime.
        gpu_writes: the option, one of `GPU_WRITES`.
        variable: the environment variable of that option, for the error.

    Raises:
        RuntimeUnavailableError: neither the GPU's driver nor the caller promises the order.
    """
    if gpu_writes == "auto" and not runtime.orders_rdma_writes:
        raise RuntimeUnavailableError(
            f"{runtime.device_name} does not say that it orders RDMA writes to its memory before a signal in host "
            f"memory, so kernels could read old data; {variable}=ordered promises that the platform does"
        )


def unsupported_reason(
    runtime: Runtime, register: Callable[[int, int], Registration], release: Callable[[Registration], None]
) -> str:
    """Registers a few bytes of a runtime's device memory and releases them. Returns the reason for a failure: the
    network device can't reach the memory, or the GPU does not order RDMA writes. Returns "" on success.

    Args:
        runtime: the GPU's runtime.
        register: registers an address and a size in bytes.
        release: ends the registration.

    Raises:
        ResourceError: the system or the network device has no room.
    """
    memory = runtime.allocate(_PROBE_BYTES)
    try:
        release(register(memory.ptr, memory.nbytes))
    except RuntimeUnavailableError as error:
        return str(error)
    finally:
        memory.close()
    return ""
