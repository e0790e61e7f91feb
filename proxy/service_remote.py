"""Manages a rank's remote links for a service in this process: devices, endpoints, and memory that peers access."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from proxyccl.device.errors import ArgumentError, ResourceError
from proxyccl.device.runtime import PinnedMemory
from proxyccl.proxy import _engine
from proxyccl.proxy.interface import Connection, EndpointInfo, ExposedMemory
from proxyccl.proxy.registrations import RemoteDevice
from proxyccl.proxy.remote_options import RemoteSetup, TransportOptions
from proxyccl.proxy.transports.table import remote_functions
from proxyccl.proxy.transports.transport import TransportEndpoint

_MOST_ENDPOINTS: int = _engine.lib.PROXYCCL_MAX_CONNECTIONS


class _PeerEndpoint(Struct):
    transport: str
    endpoint: TransportEndpoint
    options: Any = None
    used: bool = False  # whether a connection is open over the endpoint


class ServiceRemote:
    """One rank's remote links: the rank's endpoints, and the memory that peers access. `DaemonRemote` has the same
    methods.

    The first call that names a transport opens the transport's device. This first call also raises ArgumentError if an
    option names something that does not exist, and RuntimeUnavailableError, whose message states the reason, if no
    device can be used.

    Args:
        connect: makes the service's connections (`ProxyService.connect`).
        setup: describes the rank for which devices are opened.
        options: the network devices to use, and the devices' settings.

    Raises:
        ArgumentError: the range `setup.signals` is not within the control segment.
    """

    def __init__(self, connect: Callable[..., Connection], setup: RemoteSetup, options: TransportOptions) -> None:
        signals, segment = setup.signals, setup.segment
        if not 0 <= signals.start <= signals.stop <= segment.nbytes:
            raise ArgumentError("signals", f"must lie within the {segment.nbytes} bytes of the control segment")
        self._connect = connect
        self._setup = setup
        self._options = options
        self._devices: dict[Callable[[RemoteSetup, TransportOptions], RemoteDevice], RemoteDevice] = {}
        self._endpoints: dict[int, _PeerEndpoint] = {}  # maps a peer's rank to the endpoint

    def _device(self, transport: str) -> RemoteDevice:
        open_device = remote_functions(transport).open
        if open_device not in self._devices:
            self._devices[open_device] = open_device(self._setup, self._options)
        return self._devices[open_device]

    def unsupported_reason(self, transport: str) -> str:
        """Returns the reason why a transport's device can't register the memory of the rank's GPU; "" if the device can
        register that memory, or if the transport stages data. Raises ResourceError if the system or the device is out
        of memory or descriptors.
        """
        device = self._device(transport)
        if remote_functions(transport).stages:
            return ""
        return device.registrations.unsupported_reason(self._setup.runtime, device.options.gpu_writes)

    def make_endpoint(self, peer: int, transport: str) -> EndpointInfo:
        """Makes this rank's endpoint of a connection to a peer.

        Raises:
            ArgumentError: there is an endpoint for this peer already, or there is no such transport.
            ResourceError: the device or the system is out of memory or descriptors.
        """
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
        """Connects this rank's endpoint to the peer's endpoint. The call does not wait for the peer.

        Args:
            peer: the peer's rank.
            theirs: the result of the peer's `make_endpoint`.
            timeout: seconds to keep trying while the network does not know the peer.
            given_up: a function that is polled during the wait; the wait ends when it returns True.

        Raises:
            ArgumentError: the peer's endpoint is malformed, or can't be reached from this rank.
            TransportError: the system refuses to connect.
        """
        own = self._endpoint(peer)
        own.options = own.endpoint.connect(theirs, timeout, given_up)

    def open_connection(self, peer: int) -> Connection:
        """Makes the proxy's connection over an endpoint that `connect_endpoint` has connected."""
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
        """Lets peers access memory of this rank. Pair each call with a `withdraw`.

        Args:
            ptr: the memory's address in the caller's process.
            handle: handle with which another process opens the memory, and which identifies the memory's allocation;
                empty if the memory has no handle.

        Raises:
            ArgumentError: the proxy can't reach the memory.
            ResourceError: the device or the system is out of memory or descriptors.
            RuntimeUnavailableError: the device can't register the memory.
        """
        device = self._device(transport)
        if remote_functions(transport).stages:
            return ExposedMemory(transport, ptr, (device.write_targets.add(ptr, nbytes),), (), True, None)
        gpu_writes = device.options.gpu_writes
        made = device.registrations.register_of(self._setup.runtime, gpu_writes, ptr, nbytes, handle or None)
        return ExposedMemory(transport, made.address, made.keys, made.local_keys, made.how != "dma-buf", made)

    def expose_pinned(self, memory: PinnedMemory, transport: str) -> ExposedMemory:
        """Lets peers access pinned memory by a transport that stages data. CPUs copy short data to this memory. The
        memory must stay open until `withdraw`.

        Raises:
            ArgumentError: the proxy can't reach the memory, or the transport does not stage data.
            ResourceError: the system is out of memory or descriptors.
        """
        if not remote_functions(transport).stages:
            raise ArgumentError("transport", f"{transport} does not stage data")
        key = self._device(transport).write_targets.add(memory.ptr, memory.nbytes, memory.host_ptr)
        return ExposedMemory(transport, memory.ptr, (key,), (), True, None)

    def withdraw(self, memory: ExposedMemory) -> None:
        """Undoes `expose` or `expose_pinned`. Triggers must no longer name the memory, on this rank or on a peer."""
        functions = remote_functions(memory.transport)
        if functions.open not in self._devices:  # `close` has withdrawn all memory of the device
            return
        device = self._devices[functions.open]
        if functions.stages:
            device.write_targets.remove(memory.keys[0])
        else:
            device.registrations.release(memory.owner)

    def close(self) -> None:
        """Frees endpoints, registrations and devices. The proxy must be closed first."""
        with contextlib.ExitStack() as steps:  # closes the objects in reverse order, even if closing one of them fails
            for device in self._devices.values():
                steps.callback(device.close)
            for own in self._endpoints.values():
                steps.callback(own.endpoint.close)
            self._endpoints.clear()
            self._devices.clear()
