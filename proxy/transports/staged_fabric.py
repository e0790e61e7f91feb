"""The transport `staged_fabric`: writes through libfabric between pinned memory, with a copy on either side.

It is for memory that libfabric's provider can't register (engine/staged_transport.h).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from proxyccl.device.errors import ArgumentError
from proxyccl.proxy import _engine
from proxyccl.proxy.fabric.requirements import NEEDS
from proxyccl.proxy.interface import EndpointInfo
from proxyccl.proxy.staging import StagingArea
from proxyccl.proxy.transports import fabric
from proxyccl.proxy.transports.staged_connection import StagedEndpoint, staged_over

if TYPE_CHECKING:  # a rank imports them when it opens the endpoint
    from proxyccl.proxy.fabric.context import FabricContext
    from proxyccl.proxy.fabric.endpoint import FabricConnectionOptions

ffi, lib = _engine.ffi, _engine.lib


def _error_text(connection: Any) -> str:
    return ffi.string(lib.proxyccl_staged_fabric_error_text(connection)).decode(errors="replace")


class _Wire:
    """See `staged_connection.Wire`. All wires of a rank share its single endpoint."""

    def __init__(self, device: FabricContext) -> None:
        self._endpoint = device.endpoint
        self._options: FabricConnectionOptions | None = None
        self.address = device.endpoint.address

    def connect(self, theirs: EndpointInfo, timeout: float, given_up: Callable[[], bool]) -> None:
        self._options = self._endpoint.connect(theirs.endpoint, theirs.rkey)

    def options(self, theirs: EndpointInfo) -> FabricConnectionOptions:
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


TRANSPORT = staged_over(
    fabric.TRANSPORT,
    "staged_fabric",
    native_options=fabric.native_options,
    needs=NEEDS,
    make_endpoint=_make_endpoint,
    error_text=_error_text,
)
