"""A rank's options for the transports between hosts."""

from __future__ import annotations

from msgspec import Struct, field

from proxyccl.proxy.fabric.options import FabricOptions
from proxyccl.proxy.verbs.options import RdmaOptions


class TransportOptions(Struct, frozen=True):
    """Options by their subject.

    Attributes:
        rdma: options of the RDMA device, for the transports `verbs` and `staged`.
        fabric: options of libfabric, for the transports `fabric` and `staged_fabric`.
    """

    rdma: RdmaOptions = field(default_factory=RdmaOptions)
    fabric: FabricOptions = field(default_factory=FabricOptions)
