"""Pinned memory that peers' adapters read and write by libfabric, on the way from and to a device."""

from __future__ import annotations

import contextlib

from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.fabric.endpoint import FabricEndpoint


class Stages:
    """Registered memory of the host, for `Copier.staging`.

    Attributes:
        fields: of a ProxycclStaging.
    """

    def __init__(self, endpoint: FabricEndpoint, address: int, nbytes: int) -> None:
        made = endpoint.register(address, nbytes)
        self._endpoint, self._made = endpoint, made
        self.fields = {
            "by_fabric": 1,
            "descriptor": endpoint.descriptor(made),
            "key": made.key,
            "base": made.address,
        }

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, ArgumentError):  # it was never registered, or the endpoint was closed
            self._endpoint.release(self._made)
