"""One rank's endpoint of libfabric, with what the transport `fabric` needs of the rank."""

from __future__ import annotations

from proxyccl.proxy.fabric.endpoint import FabricEndpoint
from proxyccl.proxy.fabric.library import fabric_offers
from proxyccl.proxy.fabric.options import FabricOptions
from proxyccl.proxy.fabric.providers import choose_offer
from proxyccl.proxy.rdma_setup import RdmaSetup


class FabricContext:
    """An endpoint of the rank's own, and its control segment, registered.

    Attributes:
        runtime: as in the setup.
        endpoint: the endpoint.
        segment: the control segment's registration.

    Raises:
        ArgumentError: an option names something that does not exist.
        ResourceError: the system or the provider has no room.
        RuntimeUnavailableError: no provider can be used; the message says why.
    """

    def __init__(self, setup: RdmaSetup, options: FabricOptions) -> None:
        self.runtime = setup.runtime
        offer = choose_offer(fabric_offers(), options, local_rank=setup.local_rank)
        self.endpoint = FabricEndpoint(offer, options)
        self.segment = self.endpoint.register(setup.segment.host_ptr, setup.segment.nbytes)

    def close(self) -> None:
        """Deregisters all memory and closes the endpoint."""
        self.endpoint.close()
