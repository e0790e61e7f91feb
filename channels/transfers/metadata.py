"""An agent's metadata: the bytes by which others find it and its memory. Whoever has them may read and write it."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from proxyccl.channels.transfers.device_memory import Share
from proxyccl.channels.transfers.errors import MetadataError
from proxyccl.channels.transfers.fabric import Key
from proxyccl.channels.transfers.regions import Region
from proxyccl.proxy._transfers import lib
from proxyccl.proxy.codec import Codec, Message, ProtocolError, Uint64

_LIMIT = 64 << 20  # bytes: some hundred thousand regions
_TOKEN = Meta(min_length=lib.PROXYCCL_SECRET_BYTES, max_length=lib.PROXYCCL_SECRET_BYTES)


class Place(Message, frozen=True):
    """Where an agent listens.

    Attributes:
        host: the boot id of its machine.
        process: its process's number in its PID namespace.
        token: the name of its Unix socket, which is new with each agent.
        addresses: (address, port) pairs for other hosts.
        secret: the bytes that it expects of a link.
        secret_address: where they lie in its process.
        fabric: the address of its endpoint of libfabric; b"" if it has none.
    """

    host: Annotated[str, Meta(max_length=64)]
    process: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    token: Annotated[bytes, _TOKEN]
    addresses: Annotated[list[tuple[str, Annotated[int, Meta(ge=1, le=65535)]]], Meta(max_length=256)]
    secret: Annotated[bytes, _TOKEN]
    secret_address: Uint64
    fabric: Annotated[bytes, Meta(max_length=2048)]


class Metadata(Message, frozen=True):
    """An agent's message on itself: its place, some of its regions, or both. `shares` are those of devices, `keys` are
    for libfabric.
    """

    format: Literal["proxyccl-agent-1"]
    name: Annotated[str, Meta(min_length=1, max_length=1024)]
    place: Place | None
    regions: list[Region]
    shares: list[Share]
    keys: list[Key]


_CODEC = Codec(Metadata, _LIMIT, name="metadata of an agent")


def encode(name: str, place: Place | None, regions: list[Region], shares: list[Share], keys: list[Key]) -> bytes:
    """Metadata as bytes."""
    return _CODEC.encode(Metadata("proxyccl-agent-1", name, place, regions, shares, keys))


def decode(data: bytes) -> Metadata:
    """Metadata of bytes.

    Raises:
        MetadataError: they are not metadata, or not of this version.
    """
    try:
        return _CODEC.decode(data, "an agent")
    except ProtocolError as error:
        raise MetadataError(str(error)) from None
