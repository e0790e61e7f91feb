"""The cards that describe holders, and the messages between holders."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta

from proxyccl.channels.transfers.errors import MetadataError
from proxyccl.channels.weights.parts import Part
from proxyccl.proxy.codec import Codec, Message, Uint64

_METADATA = Meta(max_length=64 << 20)


class Card(Message, frozen=True):
    """The description of a holder, with which other holders connect to it.

    Attributes:
        metadata: the metadata of the holder's agent.
        holder: a random number that identifies the holder, because a later agent may have the same name.
        version_address: the address of two 64-bit words in the holder's memory. The first word is the version that
            others may read now, or 0 for none. The second word is `holder`, or 0 after the holder was closed.
        parts: the holder's parts of tensors.
        groups: for each group, the index in `parts` of its first part.
    """

    format: Literal["proxyccl-weights-3"]
    metadata: Annotated[bytes, _METADATA]
    holder: Uint64
    version_address: Uint64
    parts: list[Part]
    groups: list[Uint64]


class Join(Message, frozen=True, tag="join"):
    """Asks a holder to notify the sender of each offered version, and to wait until the sender has read the version.
    `metadata` is the metadata of the sender's agent, and `holder` is the sender's number.
    """

    metadata: Annotated[bytes, _METADATA]
    holder: Uint64


class Offered(Message, frozen=True, tag="offered"):
    """Tells a target to read the sender's version word again."""


class HasRead(Message, frozen=True, tag="read"):
    """Tells a holder that the sender, whose number is `holder`, has read this version from the holder."""

    version: Uint64
    holder: Uint64


class Leave(Message, frozen=True, tag="leave"):
    """Tells a holder that the sender, whose number is `holder`, will read no more versions."""

    holder: Uint64


CARD = Codec(Card, 512 << 20, "card of weights", MetadataError)
MESSAGE: Codec[Join | Offered | HasRead | Leave] = Codec(
    Join | Offered | HasRead | Leave, 65 << 20, name="message about weights"
)


def tensors_of(cards: Iterable[bytes]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns (shape, name of the element type), by name, for all tensors in the cards.

    Raises:
        MetadataError: an element of `cards` is not a card.
    """
    parts = (part for card in cards for part in CARD.decode(card, "a holder of weights").parts)
    return {part.tensor: (part.size, part.dtype) for part in parts}
