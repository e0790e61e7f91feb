"""The transport `staged`: RDMA writes of verbs between pinned memory of two hosts, with a copy on either side.

It is for memory that the RDMA device can't register (engine/staged_transport.h).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from proxyccl.proxy.interface import EndpointInfo
from proxyccl.proxy.staging import StagingArea
from proxyccl.proxy.transports import verbs
from proxyccl.proxy.transports.staged_connection import STATUSES, StagedEndpoint, staged_over

if TYPE_CHECKING:  # a rank imports them when it opens the device
    from proxyccl.proxy.verbs.context import VerbsContext
    from proxyccl.proxy.verbs.endpoint import VerbsOptions


class _Wire:
    """See `staged_connection.Wire`."""

    def __init__(self, device: VerbsContext) -> None:
        self._endpoint = device.device.endpoint()
        self.address = self._endpoint.address
        self.number = 0

    def connect(self, theirs: EndpointInfo, timeout: float, given_up: Callable[[], bool]) -> None:
        self._endpoint.connect(theirs.endpoint, timeout, given_up)

    def options(self, theirs: EndpointInfo) -> VerbsOptions:
        return self._endpoint.engine_options(theirs.rkey)

    def close(self) -> None:
        self._endpoint.close()


def _make_endpoint(device: VerbsContext) -> StagedEndpoint:
    options = device.options
    area = StagingArea(device.runtime, [device.registrations], options.staging_bytes, options.staging_chunk)
    keys = [(made.lkey, made.rkey, made.address) for made in area.registrations]
    return StagedEndpoint(device, area, keys, lambda: [_Wire(device)], credits_tell=False)


TRANSPORT = staged_over(
    verbs.TRANSPORT,
    "staged",
    native_options=verbs.native_options,
    needs=verbs.NEEDS,
    make_endpoint=_make_endpoint,
    statuses=STATUSES,
)
