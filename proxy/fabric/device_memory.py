"""Registers memory of the host, or of a device, with an endpoint."""

from __future__ import annotations

from collections.abc import Hashable

from proxyccl.device.runtime import Runtime
from proxyccl.proxy.fabric.endpoint import DeviceMemory, FabricEndpoint, FabricRegistration
from proxyccl.proxy.gpu_writes import require_ordered


def register_memory(
    endpoint: FabricEndpoint, runtime: Runtime, gpu_writes: str, ptr: int, nbytes: int, allocation: Hashable = None
) -> FabricRegistration:
    """Registers memory of the host, or of a device unless that does not order RDMA writes.

    Args:
        endpoint: registers it.
        runtime: tells whether it is a device's.
        gpu_writes: as in `FabricOptions`.
        ptr, nbytes, allocation: as for `FabricEndpoint.register`.

    Raises:
        RuntimeUnavailableError: the device does not order them (`require_ordered`). Other errors are those of
            `FabricEndpoint.register`.
    """
    number = None if runtime.name == "host" else runtime.pointer_device(ptr)
    if number is None:
        return endpoint.register(ptr, nbytes, allocation=allocation)
    require_ordered(runtime, gpu_writes, "PROXYCCL_FABRIC_GPU_WRITES")
    with runtime.current():
        return endpoint.register(ptr, nbytes, device=DeviceMemory(runtime.name, number), allocation=allocation)
