"""An agent's metadata: the bytes by which other agents find this agent and its memory. Anyone who has the metadata may
read and write this memory.
"""

from __future__ import annotations

import itertools
from typing import Annotated, Literal

from msgspec import Meta

from proxyccl.channels.transfers.device_memory import Share
from proxyccl.channels.transfers.errors import MetadataError
from proxyccl.channels.transfers.fabric import Key
from proxyccl.channels.transfers.regions import Region, is_range
from proxyccl.proxy._transfers import lib
from proxyccl.proxy.codec import Codec, Message, Uint64

LONGEST_NAME = 1024
_LIMIT = 64 << 20  # bytes, enough for some hundred thousand regions
_TOKEN = Meta(min_length=lib.PROXYCCL_SECRET_BYTES, max_length=lib.PROXYCCL_SECRET_BYTES)


class Place(Message, frozen=True):
    """Where an agent listens.

    Attributes:
        host: the boot id of its machine.
        process: the id of the agent's process in its PID namespace.
        addresses: (address, port) pairs for other hosts.
        secret: the bytes that the agent expects on a link.
        secret_address: address of the secret in its process.
        fabric: the address of the agent's libfabric endpoint; b"" if it has none.
        ledger: the handle of the agent's ledger.
    """

    host: Annotated[str, Meta(max_length=64)]
    process: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    addresses: Annotated[list[tuple[str, Annotated[int, Meta(ge=1, le=65535)]]], Meta(max_length=256)]
    secret: Annotated[bytes, _TOKEN]
    secret_address: Uint64
    fabric: Annotated[bytes, Meta(max_length=2048)]
    ledger: Annotated[bytes, Meta(max_length=1024)]


class Metadata(Message, frozen=True):
    """The description that an agent sends of itself: its place, some of its regions, or both.

    Attributes:
        name: the agent's name, which a later agent may have, too.
        token: a text that no other agent has; it names the agent's Unix socket.
        place: where the agent listens; None if the message leaves that out.
        regions, registrations: the agent's memory, and the number of each region's registration.
        shares, keys: how processes of the agent's host map the regions, and the regions' libfabric keys.
    """

    format: Literal["proxyccl-agent-2"]
    name: Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
    token: Annotated[bytes, _TOKEN]
    place: Place | None
    regions: list[Region]
    registrations: list[Annotated[int, Meta(ge=1, le=2**63 - 1)]]
    shares: list[Share]
    keys: list[Key]

    def __post_init__(self) -> None:
        if "\0" in self.name:
            raise ValueError("name has a NUL character")
        if len(self.regions) != len(self.registrations):
            raise ValueError(f"{len(self.regions)} regions have {len(self.registrations)} registrations")
        shared, named = ([each.region for each in self.shares], [each.region for each in self.keys])
        for region in itertools.chain(self.regions, shared, named):
            if not is_range(region):
                raise ValueError(f"regions: {region} is not a range of memory")


METADATA = Codec(Metadata, _LIMIT, "metadata of an agent", MetadataError)


def host_of(metadata: bytes) -> str:
    """Returns the boot id of an agent's machine; "" if the metadata have no place. Raises MetadataError."""
    place = METADATA.decode(metadata, "an agent").place
    return "" if place is None else place.host
