"""Registers a runtime's device memory with an RDMA device, or says why that is impossible."""

from __future__ import annotations

import functools
from collections.abc import Hashable

from proxyccl.device.runtime import Runtime
from proxyccl.proxy import gpu_writes as gpu_writes_rule
from proxyccl.proxy.verbs.registrations import Registration, Registrations


def register_device_memory(
    registrations: Registrations,
    runtime: Runtime,
    gpu_writes: str,
    ptr: int,
    nbytes: int,
    allocation: Hashable = None,
) -> Registration:
    """Registers memory of a runtime, unless its GPU does not order RDMA writes (`require_ordered`). See
    `Registrations.register` for other arguments and errors.
    """
    gpu_writes_rule.require_ordered(runtime, gpu_writes, "PROXYCCL_RDMA_GPU_WRITES")
    dmabuf = None if runtime.name == "host" else functools.partial(runtime.dmabuf, ptr, nbytes)
    return registrations.register(ptr, nbytes, dmabuf, allocation=allocation)


def unsupported_reason(registrations: Registrations, runtime: Runtime, gpu_writes: str) -> str:
    """Like `gpu_writes.unsupported_reason`, for an RDMA device."""
    register = functools.partial(register_device_memory, registrations, runtime, gpu_writes)
    return gpu_writes_rule.unsupported_reason(runtime, register, registrations.release)
