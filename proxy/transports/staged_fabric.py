"""The transport `staged_fabric`: writes through libfabric between pinned memory, with a copy on either side.

It is for memory that libfabric's provider can't register (engine/staged_transport.h).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxyccl.device.errors import ArgumentError
from proxyccl.proxy import _engine
from proxyccl.proxy.fabric import library
from proxyccl.proxy.fabric.context import FabricContext
from proxyccl.proxy.fabric.endpoint import FabricConnectionOptions
from proxyccl.proxy.interface import RdmaEndpointInfo, RdmaMemory
from proxyccl.proxy.staging import StagedOptions, StagingArea
from proxyccl.proxy.transports import fabric, staged_connection
from proxyccl.proxy.transports.engine_connection import EngineConnection, EngineRuntime
from proxyccl.proxy.transports.staged_connection import StagedEndpoint, connect_staged
from proxyccl.proxy.transports.transport import RdmaFunctions, Transport

ffi, lib = _engine.ffi, _engine.lib


def _connect(engine: EngineRuntime, options: StagedOptions) -> EngineConnection:
    return connect_staged(engine, TRANSPORT.name, options, fabric.native_options(options.wire), library.NEEDS)


def _status_text(status: int) -> str:
    return staged_connection.status_text(status, fabric.TRANSPORT.status_text)


def _error_text(connection: Any) -> str:
    return ffi.string(lib.proxyccl_staged_fabric_error_text(connection)).decode(errors="replace")


class _Wire:
    """See `staged_connection.Wire`. All wires of a rank share its one endpoint."""

    def __init__(self, device: FabricContext) -> None:
        self._endpoint = device.endpoint
        self._options: FabricConnectionOptions | None = None
        self.address = device.endpoint.address

    def connect(self, theirs: RdmaEndpointInfo, timeout: float, given_up: Callable[[], bool]) -> None:
        self._options = self._endpoint.connect(theirs.endpoint, theirs.rkey)

    def options(self, theirs: RdmaEndpointInfo) -> FabricConnectionOptions:
        if self._options is None:
            raise ArgumentError("endpoint", "it is not connected")
        return self._options

    def close(self) -> None:
        """Does nothing: the endpoint is the device's."""


def _make_endpoint(device: FabricContext) -> StagedEndpoint:
    options = device.options
    area = StagingArea(device.runtime, device.endpoint, options.staging_bytes, options.staging_chunk)
    made = area.registration
    return StagedEndpoint(device, area, (made.local_key, made.key, made.address), lambda: _Wire(device))


def _unsupported_reason(device: FabricContext) -> str:
    return ""  # what is registered is the host's


def _expose(device: FabricContext, ptr: int, nbytes: int, handle: bytes) -> RdmaMemory:
    return staged_connection.expose(TRANSPORT.name, device, ptr, nbytes)


TRANSPORT = Transport(
    name="staged_fabric",
    connect=_connect,
    status_text=_status_text,
    statuses=range(0),
    error_text=_error_text,
    rdma=RdmaFunctions(
        missing=library.missing,
        open=fabric.open_fabric,
        unsupported_reason=_unsupported_reason,
        make_endpoint=_make_endpoint,
        expose=_expose,
        withdraw=staged_connection.withdraw,
        registers_source=False,
        refusal="rank {rank}'s memory can't be staged: {reason}",
        withdraws_at_once=True,
        rehearses=False,
    ),
)
