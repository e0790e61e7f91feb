"""The transport `staged`: RDMA writes of verbs between pinned memory of two hosts, with a copy on either side.

This transport is for memory that the RDMA device can't register (engine/staged_transport.h).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from proxyccl.proxy.interface import EndpointInfo
from proxyccl.proxy.transports import verbs
from proxyccl.proxy.transports.staged_connection import STATUSES, StagedEndpoint, Wire, staged_over

if TYPE_CHECKING:  # imported at run time only when the device is opened
    from proxyccl.proxy.verbs.context import VerbsContext


def _make_wire(device: VerbsContext) -> Wire:
    endpoint = device.device.endpoint()

    def connect(theirs: EndpointInfo, timeout: float, given_up: Callable[[], bool]) -> Any:
        endpoint.connect(theirs.endpoint, timeout, given_up)
        return endpoint.engine_options(theirs.rkey)

    return Wire(endpoint.address, 0, connect, endpoint.close)


def _make_endpoint(device: VerbsContext) -> StagedEndpoint:
    return StagedEndpoint(
        device,
        [device.registrations],
        lambda made: (made.lkey, made.rkey, made.address),
        lambda: [_make_wire(device)],
        ring_bytes=device.options.staging_bytes,
        chunk_bytes=device.options.staging_chunk,
        credits_tell=False,
    )


TRANSPORT = staged_over(verbs.TRANSPORT, "staged", needs=verbs.NEEDS, make_endpoint=_make_endpoint, statuses=STATUSES)
