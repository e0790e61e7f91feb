"""Registers a device's memory with an endpoint."""

from __future__ import annotations

from collections.abc import Hashable

from proxyccl.device.runtime import Runtime
from proxyccl.proxy.fabric.endpoint import DeviceMemory, FabricEndpoint, FabricRegistration
from proxyccl.proxy.gpu_writes import require_ordered


def register_device_memory(
    endpoint: FabricEndpoint,
    runtime: Runtime,
    number: int,
    gpu_writes: str,
    ptr: int,
    nbytes: int,
    allocation: Hashable = None,
) -> FabricRegistration:
    """Registers memory of a device, unless that does not order RDMA writes.

    Args:
        endpoint: registers it.
        runtime: of the device.
        number: the device's (`pointer_device`).
        gpu_writes: as in `FabricOptions`.
        ptr, nbytes, allocation: as for `FabricEndpoint.register`.

    Raises:
        RuntimeUnavailableError: the device does not order them (`require_ordered`). Other errors are those of
            `FabricEndpoint.register`.
    """
    require_ordered(runtime, gpu_writes, "PROXYCCL_FABRIC_GPU_WRITES")
    with runtime.current():
        return endpoint.register(ptr, nbytes, device=DeviceMemory(runtime.name, number), allocation=allocation)
