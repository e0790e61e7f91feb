"""Pinned memory that peers' adapters read and write by libfabric, on the way from and to a device."""

from __future__ import annotations

from collections import deque

from proxyccl.device.process import forks
from proxyccl.proxy.fabric.endpoint import FabricEndpoint, FabricRegistration


class Stages:
    """Registered memory of the host, for `Copier.staging`.

    Args:
        endpoint: registers it.
        address: of the memory.
        nbytes: its size.
        memory: its owner.
        ended: gets the registration at the end, to be released, and the owner, which must not use the memory for
            anything else before: a peer's late write may still land there. A finalizer releases nothing itself, as
            its thread may have any lock.

    Attributes:
        fields: of a ProxycclStaging.
    """

    def __init__(
        self,
        endpoint: FabricEndpoint,
        address: int,
        nbytes: int,
        memory: object,
        ended: deque[tuple[FabricRegistration, object]],
    ) -> None:
        made = endpoint.register(address, nbytes)
        forks.finalizer(self, ended.append, (made, memory))
        self.fields = {
            "by_fabric": 1,
            "descriptor": endpoint.descriptor(made),
            "key": made.key,
            "base": made.address,
        }
