"""Whether an RDMA device can register a runtime's device memory, and how it does."""

from __future__ import annotations

import functools
from collections.abc import Hashable

from proxyccl.device.errors import RuntimeUnavailableError
from proxyccl.device.runtime import Runtime
from proxyccl.proxy.verbs.registrations import Registration, Registrations

_PROBE_BYTES = 4096


def register_device_memory(
    registrations: Registrations, runtime: Runtime, ptr: int, nbytes: int, allocation: Hashable = None
) -> Registration:
    """Registers memory of a runtime. Arguments and errors as for `Registrations.register`."""
    dmabuf = None if runtime.name == "host" else functools.partial(runtime.dmabuf, ptr, nbytes)
    return registrations.register(ptr, nbytes, dmabuf, allocation=allocation)


def probe(registrations: Registrations, runtime: Runtime) -> Registration:
    """Registers a few bytes of a runtime's device memory and releases them. Returns that registration.

    Raises:
        ResourceError: the system or the device has no room.
        RuntimeUnavailableError: the RDMA device can't reach the runtime's device memory.
    """
    memory = runtime.allocate(_PROBE_BYTES)
    try:
        registration = register_device_memory(registrations, runtime, memory.ptr, memory.nbytes)
        registrations.release(registration)
        return registration
    finally:
        memory.close()


def unsupported_reason(registrations: Registrations, runtime: Runtime) -> str:
    """Why the RDMA device can't reach the runtime's device memory; empty if it can.

    Raises:
        ResourceError: the system or the device has no room.
    """
    try:
        probe(registrations, runtime)
    except RuntimeUnavailableError as error:
        return str(error)
    return ""
