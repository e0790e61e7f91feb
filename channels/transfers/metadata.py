"""An agent's metadata: the bytes with which other agents can connect to this agent, and read and write its memory."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from proxyccl.channels.transfers.blocks import Rows
from proxyccl.channels.transfers.device_memory import Share
from proxyccl.channels.transfers.errors import MetadataError
from proxyccl.channels.transfers.fabric import Key, Rails
from proxyccl.channels.transfers.regions import END, LONGEST_LABEL, Region, regions_of
from proxyccl.proxy._transfers import lib
from proxyccl.proxy.codec import Codec, Message, Uint64

LONGEST_NAME = 1024
_ROW_BYTES = 5 * 8
_LIMIT = 64 << 20  # bytes; enough for several 100,000 regions
_TOKEN = Meta(min_length=lib.PROXYCCL_SECRET_BYTES, max_length=lib.PROXYCCL_SECRET_BYTES)


class Place(Message, frozen=True):
    """The addresses and the secret with which peers connect to an agent.

    Attributes:
        host: the boot id of the agent's machine.
        process: the id of the agent's process in its PID namespace.
        addresses: (address, port) pairs for other hosts.
        secret: the bytes that a peer must send first.
        secret_address: the address of the secret in the agent's process.
        fabric: the agent's libfabric endpoints, or None.
        ledger, ledger_address: the handle of the agent's ledger, and the address of the ledger in the agent's process.
    """

    host: Annotated[str, Meta(max_length=64)]
    process: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    addresses: Annotated[list[tuple[str, Annotated[int, Meta(ge=1, le=65535)]]], Meta(max_length=256)]
    secret: Annotated[bytes, _TOKEN]
    secret_address: Uint64
    fabric: Rails | None
    ledger: Annotated[bytes, Meta(max_length=1024)]
    ledger_address: Uint64


class Metadata(Message, frozen=True):
    """An agent's metadata: how to connect to the agent, some of its regions, or both.

    Attributes:
        name: the agent's name, which other agents may also use after this one has ended.
        token: random bytes that identify the agent and name its Unix socket.
        place: the addresses with which peers connect to the agent; None in metadata that only add regions.
        rows, labels: the registered regions: the bytes of their columns (`columns_of`), and their labels; no labels if
            all are empty.
        shares, keys: the handles by which processes of the host map the regions, and the regions' libfabric keys.
            Receivers ignore those of other regions.
    """

    format: Literal["proxyccl-agent-5"]
    name: Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]
    token: Annotated[bytes, _TOKEN]
    place: Place | None
    rows: bytes
    labels: list[Annotated[str, Meta(max_length=LONGEST_LABEL)]]
    shares: list[Share]
    keys: list[Key]

    def __post_init__(self) -> None:
        if "\0" in self.name:
            raise ValueError("name has a NUL character")
        if len(self.rows) % _ROW_BYTES:
            raise ValueError(f"rows has {len(self.rows)} bytes, which is not a multiple of {_ROW_BYTES}")
        starts, ends, _, numbers, are_vram = self.columns
        if self.labels and len(self.labels) != len(starts):
            raise ValueError(f"{len(starts)} regions have {len(self.labels)} labels")
        wrong = (starts > ends) | (ends >= END) | (numbers - np.uint64(1) >= END - 1) | (are_vram > 1)
        if wrong.any():
            raise ValueError(f"rows: row {wrong.argmax()} is not a registered range of memory")

    @property
    def columns(self) -> Rows:
        """The columns of the regions (`columns_of`)."""
        return np.frombuffer(self.rows, np.uint64).reshape(5, -1)

    def regions(self) -> list[Region]:
        """Returns the regions."""
        return regions_of(self.columns, self.labels or [""] * self.columns.shape[1])


METADATA = Codec(Metadata, _LIMIT, "metadata of an agent", MetadataError)


def host_of(metadata: bytes) -> str:
    """Returns the boot id of an agent's machine; "" if the metadata do not contain it. Raises MetadataError."""
    place = METADATA.decode(metadata, "an agent").place
    return "" if place is None else place.host
