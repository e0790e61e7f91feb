"""One rank's remote links, for a service in this process: devices, endpoints, and memory that peers reach."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from proxyccl.device.errors import ArgumentError, ResourceError
from proxyccl.device.runtime import PinnedMemory
from proxyccl.proxy import _engine
from proxyccl.proxy.interface import Connection, EndpointInfo, ExposedMemory
from proxyccl.proxy.remote_setup import RemoteSetup
from proxyccl.proxy.transport_options import TransportOptions
from proxyccl.proxy.transports.table import remote_functions
from proxyccl.proxy.transports.transport import TransportEndpoint

_MOST_ENDPOINTS: int = _engine.lib.PROXYCCL_MAX_CONNECTIONS


class _PeerEndpoint(Struct):
    transport: str
    endpoint: TransportEndpoint
    options: Any = None  # of the connection; None until the endpoint is connected
    used: bool = False  # whether a connection is open over the endpoint


class ServiceRemote:
    """See `proxyccl.proxy.interface.RemoteContext` for the methods.

    Args:
        connect: makes the service's connections (`ProxyService.connect`).
        setup: describes the rank for which devices are opened.
        options: the devices and their settings.

    Raises:
        ArgumentError: the words to signal leave the control segment.
    """

    def __init__(self, connect: Callable[..., Connection], setup: RemoteSetup, options: TransportOptions) -> None:
        signals, segment = setup.signals, setup.segment
        if not 0 <= signals.start <= signals.stop <= segment.nbytes:
            raise ArgumentError("signals", f"must lie within the {segment.nbytes} bytes of the control segment")
        self._connect = connect
        self._setup = setup
        self._options = options
        self._devices: dict[Callable[[RemoteSetup, TransportOptions], Any], Any] = {}  # by `open`
        self._endpoints: dict[int, _PeerEndpoint] = {}  # by peer

    def _device(self, transport: str) -> Any:
        open_device = remote_functions(transport).open
        if open_device not in self._devices:
            self._devices[open_device] = open_device(self._setup, self._options)
        return self._devices[open_device]

    def unsupported_reason(self, transport: str) -> str:
        return remote_functions(transport).unsupported_reason(self._device(transport))

    def make_endpoint(self, peer: int, transport: str) -> EndpointInfo:
        functions = remote_functions(transport)
        if peer in self._endpoints:
            raise ArgumentError("peer", f"rank {peer} has an endpoint here already")
        if len(self._endpoints) == _MOST_ENDPOINTS:
            raise ResourceError(f"a rank has at most {_MOST_ENDPOINTS} remote connections")
        endpoint = functions.make_endpoint(self._device(transport))
        self._endpoints[peer] = _PeerEndpoint(transport, endpoint)
        return endpoint.info

    def connect_endpoint(
        self, peer: int, theirs: EndpointInfo, timeout: float, given_up: Callable[[], bool] = lambda: False
    ) -> None:
        """See `RemoteContext.connect_endpoint`. The wait also ends once `given_up` returns True."""
        own = self._endpoint(peer)
        own.options = own.endpoint.connect(theirs, timeout, given_up)

    def open_connection(self, peer: int) -> Connection:
        own = self._endpoint(peer)
        if own.options is None or own.used:
            raise ArgumentError(
                "peer", f"the endpoint for rank {peer} is {'in use already' if own.used else 'not connected'}"
            )
        own.used = True
        return self._connect(own.transport, own.options, peer=peer)

    def _endpoint(self, peer: int) -> _PeerEndpoint:
        if peer not in self._endpoints:
            raise ArgumentError("peer", f"rank {peer} has no endpoint here; make it first")
        return self._endpoints[peer]

    def expose(self, ptr: int, nbytes: int, transport: str, handle: bytes) -> ExposedMemory:
        return remote_functions(transport).expose(self._device(transport), ptr, nbytes, handle)

    def expose_pinned(self, memory: PinnedMemory, transport: str) -> ExposedMemory:
        expose = remote_functions(transport).expose_pinned
        if expose is None:
            raise ArgumentError("transport", f"{transport} does not stage data")
        return expose(self._device(transport), memory)

    def withdraw(self, memory: ExposedMemory) -> None:
        functions = remote_functions(memory.transport)
        if functions.open in self._devices:  # a closed device has withdrawn everything
            functions.withdraw(self._devices[functions.open], memory)

    def close(self) -> None:
        with contextlib.ExitStack() as steps:  # closes in reverse order, even if one fails
            for device in self._devices.values():
                steps.callback(device.close)
            for own in self._endpoints.values():
                steps.callback(own.endpoint.close)
            self._endpoints.clear()
            self._devices.clear()
