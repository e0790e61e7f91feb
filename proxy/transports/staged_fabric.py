"""The transport `staged_fabric`: writes through libfabric between pinned memory, with a copy on either side.

This transport is for memory that libfabric's provider can't register (engine/staged_transport.h).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proxyccl.proxy import _engine
from proxyccl.proxy.fabric.requirements import NEEDS
from proxyccl.proxy.transports import fabric
from proxyccl.proxy.transports.staged_connection import StagedEndpoint, Wire, staged_over

if TYPE_CHECKING:  # imported at run time only when the endpoint is opened
    from proxyccl.proxy.fabric.context import FabricContext
    from proxyccl.proxy.fabric.endpoint import FabricEndpoint

ffi, lib = _engine.ffi, _engine.lib

_LEAST_RING, _RING_PER_WIRE = 4 << 20, 2 << 20
_FOR_FULL_RINGS = 512 << 20
"""Pinned memory of a rank whose rings have their full size. A rank may have hundreds of peers: later ones have less."""


def _error_text(connection: Any) -> str:
    return ffi.string(lib.proxyccl_staged_fabric_error_text(connection)).decode(errors="replace")


def _wire(endpoint: FabricEndpoint, number: int) -> Wire:
    """Makes a wire to one peer of an endpoint, which the device owns."""
    return Wire(
        endpoint.address,
        number,
        connect=lambda theirs, timeout, given_up: endpoint.connect(theirs.endpoint, theirs.rkey),
        close=lambda: None,
    )


def default_ring(wires: int, peers: int) -> int:
    """The bytes of a peer's ring in each direction, given the streams to the peer and the peers so far, this one
    included.
    """
    return max(_LEAST_RING, min(wires * _RING_PER_WIRE, _FOR_FULL_RINGS // (2 * peers)))


def first_wire(wires: int, peers: int) -> int:
    """The number of a peer's first wire, given the wires to the peer and the peers so far, this one included.

    Short puts use only a connection's first wires. So each later peer's first wire is as far as possible from the
    earlier peers': 0, a half of the wires, a quarter, three quarters, …
    """
    place, step, left = 0.0, 0.5, peers - 1
    while left:
        left, odd = divmod(left, 2)
        place, step = place + odd * step, step / 2
    return int(place * wires)


def _make_endpoint(device: FabricContext) -> StagedEndpoint:
    options, endpoints = device.options, device.wire_endpoints()
    device.staged_peers += 1
    first = first_wire(len(endpoints), device.staged_peers)
    numbered = [*enumerate(endpoints)]
    wires = numbered[first:] + numbered[:first]
    ring_bytes = options.staging_bytes or default_ring(len(endpoints), device.staged_peers)
    return StagedEndpoint(
        device,
        [endpoint for _, endpoint in wires],
        lambda made: (made.local_key, made.key, made.address),
        lambda: [_wire(endpoint, number) for number, endpoint in wires],
        ring_bytes=ring_bytes,
        chunk_bytes=options.staging_chunk,
        credits_tell=device.endpoint.offer.is_stream,
    )


TRANSPORT = staged_over(
    fabric.TRANSPORT, "staged_fabric", needs=NEEDS, make_endpoint=_make_endpoint, error_text=_error_text
)
