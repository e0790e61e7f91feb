"""The transport `staged`: RDMA writes of verbs between pinned memory of two hosts, with a copy on either side.

It is for memory that the RDMA device can't register (engine/staged_transport.h).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from proxyccl.proxy.interface import EndpointInfo
from proxyccl.proxy.transports import verbs
from proxyccl.proxy.transports.staged_connection import STATUSES, StagedEndpoint, staged_over

if TYPE_CHECKING:  # a rank imports them when it opens the device
    from proxyccl.proxy.verbs.context import VerbsContext


class _Wire:
    """See `staged_connection.Wire`."""

    def __init__(self, device: VerbsContext) -> None:
        self._endpoint = device.device.endpoint()
        self.address = self._endpoint.address
        self.number = 0

    def connect(self, theirs: EndpointInfo, timeout: float, given_up: Callable[[], bool]) -> None:
        self._endpoint.connect(theirs.endpoint, timeout, given_up)

    def options(self, theirs: EndpointInfo) -> Any:
        return self._endpoint.engine_options(theirs.rkey)

    def close(self) -> None:
        self._endpoint.close()


def _make_endpoint(device: VerbsContext) -> StagedEndpoint:
    return StagedEndpoint(
        device,
        [device.registrations],
        lambda made: (made.lkey, made.rkey, made.address),
        lambda: [_Wire(device)],
        ring_bytes=device.options.staging_bytes,
        chunk_bytes=device.options.staging_chunk,
        credits_tell=False,
    )


TRANSPORT = staged_over(verbs.TRANSPORT, "staged", needs=verbs.NEEDS, make_endpoint=_make_endpoint, statuses=STATUSES)
