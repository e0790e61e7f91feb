"""The address of an endpoint, which a rank sends to its peer as bytes. The peer checks the bytes."""

from __future__ import annotations

import ipaddress
import struct
import zlib
from dataclasses import dataclass

from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.remote_options import MTUS

LINK_LAYERS = ("infiniband", "ethernet")
GID_TYPES = ("IB", "RoCE v1", "RoCE v2")

_LAYOUT = struct.Struct("<4sBBBBIIHHBB16s")
_CHECKSUM = struct.Struct("<I")
_MAGIC = b"PXRD"
_VERSION = 2
_QP_NUMBERS = range(2, 0xFFFFFF)  # 0 and 1 are a port's special queue pairs; 0xFFFFFF is for multicast
_PSNS = range(1 << 24)
_LIDS = range(1, 0xC000)  # higher LIDs are multicast addresses
_PORTS = range(1, 255)


@dataclass(frozen=True)
class EndpointAddress:
    """An endpoint's address and capabilities.

    Attributes:
        qp_number: number of the queue pair.
        psn: the first packet sequence number that the endpoint sends.
        gid: the port's GID, 16 bytes.
        gid_type: "IB", "RoCE v1" or "RoCE v2".
        link_layer: "infiniband" or "ethernet".
        lid: the port's LID on InfiniBand, otherwise 0.
        port: number of the port.
        mtu: the largest path MTU that the endpoint supports, in bytes.
        atomics: number of the peer's atomics that the device executes at a time; 0 if it supports no atomics.
        reads: number of the peer's reads and atomics that the device executes at a time; 0 if it supports no reads.
    """

    qp_number: int
    psn: int
    gid: bytes
    gid_type: str
    link_layer: str
    lid: int
    port: int
    mtu: int
    atomics: int
    reads: int

    SIZE = _LAYOUT.size + _CHECKSUM.size

    def __str__(self) -> str:
        gid = ipaddress.IPv6Address(self.gid)
        return f"queue pair {self.qp_number} at {gid.ipv4_mapped or gid} ({self.gid_type})"

    def encode(self) -> bytes:
        data = _LAYOUT.pack(
            _MAGIC,
            _VERSION,
            LINK_LAYERS.index(self.link_layer),
            GID_TYPES.index(self.gid_type),
            self.port,
            self.qp_number,
            self.psn,
            self.lid,
            self.mtu,
            self.atomics,
            self.reads,
            self.gid,
        )
        return data + _CHECKSUM.pack(zlib.crc32(data))

    @classmethod
    def decode(cls, data: bytes) -> EndpointAddress:
        """Decodes the bytes that `encode` returns. Raises ArgumentError for any other bytes, and for addresses of
        another format version.
        """
        if not isinstance(data, bytes) or not data.startswith(_MAGIC):
            raise ArgumentError("peer", f"not an endpoint's address; expected bytes that begin with {_MAGIC!r}")
        if data[4:5] != bytes([_VERSION]):
            raise ArgumentError(
                "peer", f"an endpoint's address of format version {data[4:5].hex() or 'none'}; expected {_VERSION:02x}"
            )
        if len(data) != cls.SIZE:
            raise ArgumentError("peer", f"an endpoint's address of {len(data)} bytes; expected {cls.SIZE}")
        (checksum,) = _CHECKSUM.unpack_from(data, _LAYOUT.size)
        if checksum != zlib.crc32(data[: _LAYOUT.size]):
            raise ArgumentError("peer", "a damaged endpoint's address: its checksum does not match")
        _, _, layer, kind, port, number, psn, lid, mtu, atomics, reads, gid = _LAYOUT.unpack_from(data)
        checks = {
            "link layer": layer < len(LINK_LAYERS),
            "GID type": kind < len(GID_TYPES),
            "port": port in _PORTS,
            "queue pair number": number in _QP_NUMBERS,
            "packet sequence number": psn in _PSNS,
            "MTU": mtu in MTUS,
            "LID": lid in _LIDS or (lid == 0 and layer == LINK_LAYERS.index("ethernet")),
            "GID": any(gid),
        }
        for name, valid in checks.items():
            if not valid:
                raise ArgumentError("peer", f"an endpoint's address with an invalid {name}")
        return cls(number, psn, gid, GID_TYPES[kind], LINK_LAYERS[layer], lid, port, mtu, atomics, reads)
