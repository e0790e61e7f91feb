"""The address of an endpoint, which a rank sends to its peer as bytes. The peer checks the bytes."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from msgspec import Meta

from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.codec import Codec, Message, ProtocolError
from proxyccl.proxy.remote_options import MTUS

LINK_LAYERS = ("infiniband", "ethernet")
GID_TYPES = ("IB", "RoCE v1", "RoCE v2")
_Uint8 = Annotated[int, Meta(ge=0, lt=1 << 8)]


class EndpointAddress(Message, frozen=True):
    """An endpoint's address and capabilities."""

    # Number of the queue pair. 0 and 1 are a port's special queue pairs, and 0xFFFFFF is for multicast.
    qp_number: Annotated[int, Meta(ge=2, lt=0xFFFFFF)]
    psn: Annotated[int, Meta(ge=0, lt=1 << 24)]  # the first packet sequence number that the endpoint sends
    gid: Annotated[bytes, Meta(min_length=16, max_length=16)]  # the port's GID, 16 bytes
    gid_type: str  # "IB", "RoCE v1" or "RoCE v2"
    link_layer: str  # "infiniband" or "ethernet"
    # The port's LID on InfiniBand, otherwise 0. Higher numbers are multicast addresses.
    lid: Annotated[int, Meta(ge=0, lt=0xC000)]
    port: Annotated[int, Meta(ge=1, lt=255)]  # number of the port
    mtu: int  # the largest path MTU that the endpoint supports, in bytes
    atomics: _Uint8  # number of the peer's atomics that the device executes at a time; 0 if it supports no atomics
    # Number of the peer's reads and atomics that the device executes at a time; 0 if it supports no reads.
    reads: _Uint8

    def __post_init__(self) -> None:
        checks = {
            "gid": any(self.gid),
            "gid_type": self.gid_type in GID_TYPES,
            "link_layer": self.link_layer in LINK_LAYERS,
            "lid": self.lid or self.link_layer == "ethernet",
            "mtu": self.mtu in MTUS,
        }
        for name, valid in checks.items():
            if not valid:
                raise ValueError(f"{name} is {getattr(self, name)!r}")

    def __str__(self) -> str:
        gid = ipaddress.IPv6Address(self.gid)
        return f"queue pair {self.qp_number} at {gid.ipv4_mapped or gid} ({self.gid_type})"

    def encode(self) -> bytes:
        return ADDRESS.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> EndpointAddress:
        """Decodes the bytes that `encode` returns. Raises ArgumentError for any other bytes."""
        try:
            return ADDRESS.decode(data, "the peer")
        except ProtocolError as error:
            raise ArgumentError("peer", str(error)) from None


ADDRESS = Codec(EndpointAddress, 512, "endpoint's address")
