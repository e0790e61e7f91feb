"""The transport `fabric`: RMA writes through libfabric, for networks without verbs (engine/fabric_transport.h)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from proxyccl.device.errors import ArgumentError, RuntimeUnavailableError
from proxyccl.proxy import _engine
from proxyccl.proxy.fabric.requirements import NEEDS, missing
from proxyccl.proxy.gpu_writes import unsupported_reason
from proxyccl.proxy.interface import EndpointInfo, ExposedMemory
from proxyccl.proxy.remote_setup import RemoteSetup
from proxyccl.proxy.transport_options import TransportOptions
from proxyccl.proxy.transports.engine_connection import EngineConnection, create
from proxyccl.proxy.transports.transport import RemoteFunctions, Transport

if TYPE_CHECKING:  # imported at run time only when the endpoint is opened
    from proxyccl.proxy.fabric.context import FabricContext

ffi, lib = _engine.ffi, _engine.lib

_OWN_ERRORS = 256  # first error number of libfabric; lower numbers are errno values


def _status_text(status: int) -> str:
    if status == lib.PROXYCCL_FABRIC_NO_READS:
        return "the provider of one of the two ranks can't read; have the peer put the data"
    error = status - lib.PROXYCCL_FABRIC_FAILED
    if error < _OWN_ERRORS:
        return os.strerror(error)
    from proxyccl.proxy.fabric.library import load

    try:
        return load().words(error)
    except RuntimeUnavailableError:  # the status is of another rank, whose machine has the library
        return f"libfabric's error {error}"


def _error_text(connection: Any) -> str:
    return ffi.string(lib.proxyccl_fabric_error_text(connection)).decode(errors="replace")


class _Endpoint:
    """See `TransportEndpoint`. All peers reach the rank's single endpoint."""

    def __init__(self, device: FabricContext) -> None:
        self._device = device
        segment = device.registered_segment
        self.info = EndpointInfo(device.endpoint.address, segment.address, segment.key)

    def connect(self, theirs: EndpointInfo, timeout: float, given_up: Callable[[], bool]) -> Any:
        if theirs.ring_bytes:
            raise ArgumentError("peer", "its end of the connection is staged, but this end is not")
        return self._device.endpoint.connect(theirs.endpoint, theirs.rkey)

    def close(self) -> None:
        """Does nothing, because the device owns the endpoint."""


def open_fabric(setup: RemoteSetup, options: TransportOptions) -> FabricContext:
    """Opens the endpoint, which `fabric` and `staged_fabric` share."""
    from proxyccl.proxy.fabric.context import FabricContext

    return FabricContext(setup, options.fabric)


def _unsupported_reason(device: FabricContext) -> str:
    return unsupported_reason(device.runtime, device.register, device.endpoint.release)


def _expose(device: FabricContext, ptr: int, nbytes: int, handle: bytes) -> ExposedMemory:
    made = device.register(ptr, nbytes, handle or None)
    return ExposedMemory(TRANSPORT.name, made.address, made.key, made.local_key, True, made)


def _withdraw(device: FabricContext, memory: ExposedMemory) -> None:
    device.endpoint.release(memory.owner)


TRANSPORT = Transport(
    name="fabric",
    connect=lambda engine, options: EngineConnection(create(engine, "fabric", options, needs=NEEDS)),
    status_text=_status_text,
    statuses=range(lib.PROXYCCL_FABRIC_FAILED, 2 * lib.PROXYCCL_FABRIC_FAILED),
    error_text=_error_text,
    remote=RemoteFunctions(
        missing=missing,
        open=open_fabric,
        unsupported_reason=_unsupported_reason,
        make_endpoint=_Endpoint,
        expose=_expose,
        withdraw=_withdraw,
        registers_source=True,
        refusal="rank {rank}'s memory can't be reached through libfabric: {reason}; "
        'transport="staged_fabric" takes data through pinned memory of the host',
        rehearses=False,
    ),
)
