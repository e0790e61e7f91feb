"""One rank's libfabric endpoint, and the rank's state for the transports `fabric` and `staged_fabric`."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable

from proxyccl.proxy.fabric.endpoint import FabricEndpoint, FabricRegistration, register_memory
from proxyccl.proxy.fabric.library import fabric_offers
from proxyccl.proxy.fabric.options import FabricOptions
from proxyccl.proxy.fabric.providers import choose_offer
from proxyccl.proxy.remote_setup import RemoteSetup
from proxyccl.proxy.staging import MOST_WIRES, RemoteWriteTargets

_CORES_PER_STREAM = 2
"""A rank with several streams needs cores for its program and its proxy too, and the system for its own work."""


class FabricContext:
    """The rank's endpoint, with which the control segment is registered.

    Attributes:
        runtime, segment, signals: see `RemoteSetup`.
        options: the provider's name and settings.
        endpoint: the endpoint, which is also the first of the endpoints for staged data.
        registered_segment: the control segment's registration.
        write_targets: memory that peers' staged puts may write.
        staged_peers: the number of peers with rings.

    Raises:
        ArgumentError: an option names something that does not exist.
        ResourceError: the system or the provider has no room.
        RuntimeUnavailableError: no provider can be used; the message says why.
    """

    def __init__(self, setup: RemoteSetup, options: FabricOptions) -> None:
        self.runtime = setup.runtime
        self.options = options
        self.write_targets = RemoteWriteTargets()
        self.staged_peers = 0
        self.segment = setup.segment
        self.signals = setup.signals
        offers = fabric_offers(device_memory=setup.runtime.name != "host")
        self.endpoint = FabricEndpoint(choose_offer(offers, options, local_rank=setup.local_rank), options)
        with contextlib.ExitStack() as undo:
            undo.callback(self.endpoint.close)
            self.registered_segment = self.endpoint.register(setup.segment.host_ptr, setup.segment.nbytes)
            undo.pop_all()
        self._wire_endpoints = [self.endpoint]
        self._core_share = setup.core_share

    def wire_endpoints(self) -> list[FabricEndpoint]:
        """The endpoints for staged data: `FabricOptions.streams` of them, of one offer. The first call opens them.

        Raises:
            ResourceError: the system or the provider has no room.
            RuntimeUnavailableError: the provider can't open them; the message says why.
        """
        offer, made = self.endpoint.offer, self._wire_endpoints
        streams = self.options.streams or (default_streams(self._core_share) if offer.is_stream else 1)
        while len(made) < streams:
            made.append(FabricEndpoint(offer, self.options))
        return made

    def register(self, ptr: int, nbytes: int, allocation: Hashable = None) -> FabricRegistration:
        """Registers memory with the endpoint (`register_memory`)."""
        return register_memory(self.endpoint, self.runtime, self.options.gpu_writes, ptr, nbytes, allocation)

    def close(self) -> None:
        """Deregisters all memory and closes the endpoints."""
        with contextlib.ExitStack() as steps:  # closes all, even if one fails
            for endpoint in self._wire_endpoints:
                steps.callback(endpoint.close)


def default_streams(core_share: int) -> int:
    """The default number of streams for staged data over sockets. Each has a thread, for all of a rank's peers.

    Args:
        core_share: cores that the rank's threads may keep busy.
    """
    return max(1, min(MOST_WIRES, core_share // _CORES_PER_STREAM))
