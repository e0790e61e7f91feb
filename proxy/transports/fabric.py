"""The transports over libfabric, for networks without verbs.

`fabric` makes RMA writes and reads (engine/fabric_transport.h). `staged_fabric` makes RMA writes between pinned memory
of the two hosts, with a copy at each end, for memory that libfabric's provider can't register
(engine/staged_transport.h).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from msgspec.structs import replace

from proxyccl.device.errors import RuntimeUnavailableError
from proxyccl.proxy import _engine
from proxyccl.proxy.fabric.requirements import NEEDS, missing
from proxyccl.proxy.remote_options import RemoteSetup, TransportOptions
from proxyccl.proxy.transports.rails import PEER_SECONDS, Rail
from proxyccl.proxy.transports.staged_connection import StagedEndpoint, staged_over
from proxyccl.proxy.transports.transport import DirectEndpoint, RemoteFunctions, Transport, Wire, connect

if TYPE_CHECKING:  # imported at run time only when the endpoint is opened
    from proxyccl.proxy.fabric.endpoint import FabricContext, FabricEndpoint, PeerEndpoint

ffi, lib = _engine.ffi, _engine.lib

_LEAST_RING, _RING_PER_WIRE = 4 << 20, 2 << 20
_FOR_FULL_RINGS = 512 << 20
"""While all rings of a rank take at most this many bytes of pinned memory, a new peer's rings have full size. Later
peers get smaller rings, because a rank may have hundreds of peers.
"""
_OWN_ERRORS = 256  # libfabric's own error numbers begin here; lower numbers are errno values


def _status_text(status: int) -> str:
    if status == lib.PROXYCCL_FABRIC_NO_READS:
        return "the provider of one of the two ranks can't read; have the peer put the data"
    error = status - lib.PROXYCCL_FABRIC_FAILED
    if error < _OWN_ERRORS:
        return os.strerror(error)
    from proxyccl.proxy.fabric.library import load

    try:
        return load().words(error)
    except RuntimeUnavailableError:  # the status may come from a rank on another machine, which has libfabric
        return f"libfabric's error {error}"


def _open(setup: RemoteSetup, options: TransportOptions) -> FabricContext:
    from proxyccl.proxy.fabric.endpoint import FabricContext

    return FabricContext(setup, options.fabric)


def _wire(endpoint: FabricEndpoint | PeerEndpoint, number: int = 0) -> Wire:
    """Makes a wire whose `close` leaves the endpoint open, because the device owns the endpoint."""
    return Wire(
        endpoint.address,
        number,
        connect=lambda theirs, timeout, given_up: endpoint.connect(theirs.endpoint, theirs.rkey),
        close=lambda: None,
        speed=int(endpoint.offer.rate),
    )


def _peer_wire(rank: FabricEndpoint) -> Wire:
    endpoint = rank.peer_endpoint()
    rail = Rail(rank.offer.domain, endpoint.stop, endpoint.reconnect, rank.is_running)
    return replace(_wire(endpoint), close=endpoint.close, rail=rail)


def _make_endpoint(device: FabricContext) -> DirectEndpoint:
    """Makes an endpoint with a wire for each interface. The wires' endpoints of libfabric serve this peer alone if a
    connection can go on after an interface has failed; otherwise they serve all peers.
    """
    recovers = len(device.endpoints) > 1 and device.endpoints[0].offer.recovers
    wires = map(_peer_wire if recovers else _wire, device.endpoints)
    return DirectEndpoint(device, wires, limit_ns=PEER_SECONDS * 10**9, over_fabric=1)


TRANSPORT = Transport(
    name="fabric",
    connect=lambda engine, options: connect(engine, "fabric", options, NEEDS),
    status_text=_status_text,
    statuses=range(lib.PROXYCCL_FABRIC_FAILED, 2 * lib.PROXYCCL_FABRIC_FAILED),
    remote=RemoteFunctions(
        missing=missing,
        open=_open,
        make_endpoint=_make_endpoint,
        refusal="rank {rank}'s memory can't be reached through libfabric: {reason}; "
        'transport="staged_fabric" takes data through pinned memory of the host',
        rehearses=False,
    ),
)


def default_ring(wires: int, peers: int) -> int:
    """Returns the default size in bytes of each of the two rings for a peer, given the number of wires to the peer and
    the number of peers so far, this peer included.
    """
    return max(_LEAST_RING, min(wires * _RING_PER_WIRE, _FOR_FULL_RINGS // (2 * peers)))


def first_wire(wires: int, peers: int) -> int:
    """Returns the index of the endpoint that a peer's first wire uses, given the number of wires to the peer and the
    number of peers so far, this peer included.

    Short puts use only a connection's first wires, so each peer's first wire is as far as possible from the first wires
    of earlier peers. With n wires, the peers' first wires are 0, n/2, n/4, 3n/4, …
    """
    place, step, left = 0.0, 0.5, peers - 1
    while left:
        left, odd = divmod(left, 2)
        place, step = place + odd * step, step / 2
    return int(place * wires)


def _make_staged_endpoint(device: FabricContext) -> StagedEndpoint:
    options, endpoints = device.options, device.wire_endpoints()
    device.staged_peers += 1
    interfaces = len(device.endpoints)
    # `first` is a multiple of `interfaces`, so that both ranks of a pair use the same interface for a wire.
    first = first_wire(len(endpoints) // interfaces, device.staged_peers) * interfaces
    numbered = [*enumerate(endpoints)]
    wires = numbered[first:] + numbered[:first]
    ring_bytes = options.staging_bytes or default_ring(len(endpoints), device.staged_peers)
    return StagedEndpoint(
        device,
        [endpoint for _, endpoint in wires],
        lambda: [_wire(endpoint, number) for number, endpoint in wires],
        ring_bytes=ring_bytes,
        chunk_bytes=options.staging_chunk,
        credits_tell=device.endpoints[0].offer.is_stream,
    )


STAGED = staged_over(TRANSPORT, "staged_fabric", needs=NEEDS, make_endpoint=_make_staged_endpoint)
