"""Whether an RDMA device can register a runtime's device memory, and how it does."""

from __future__ import annotations

import functools
from collections.abc import Hashable

from proxyccl.device.errors import RuntimeUnavailableError
from proxyccl.device.runtime import Runtime
from proxyccl.proxy.gpu_writes import require_ordered
from proxyccl.proxy.verbs.registrations import Registration, Registrations

_PROBE_BYTES = 4096


def register_device_memory(
    registrations: Registrations,
    runtime: Runtime,
    gpu_writes: str,
    ptr: int,
    nbytes: int,
    allocation: Hashable = None,
) -> Registration:
    """Registers memory of a runtime, unless its device does not order RDMA writes (`require_ordered`). Other arguments
    and errors as for `Registrations.register`.
    """
    require_ordered(runtime, gpu_writes, "PROXYCCL_RDMA_GPU_WRITES")
    dmabuf = None if runtime.name == "host" else functools.partial(runtime.dmabuf, ptr, nbytes)
    return registrations.register(ptr, nbytes, dmabuf, allocation=allocation)


def unsupported_reason(registrations: Registrations, runtime: Runtime, gpu_writes: str) -> str:
    """Why RDMA can't reach the runtime's device memory: the RDMA device does not, or the memory's device does not
    order RDMA writes. Empty if it can.

    Raises:
        ResourceError: the system or the device has no room.
    """
    memory = runtime.allocate(_PROBE_BYTES)
    try:
        registrations.release(register_device_memory(registrations, runtime, gpu_writes, memory.ptr, memory.nbytes))
    except RuntimeUnavailableError as error:
        return str(error)
    finally:
        memory.close()
    return ""
