"""The bytes that describe a holder, and the messages between holders."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta

from proxyccl.channels.transfers.errors import MetadataError
from proxyccl.channels.weights.parts import Part
from proxyccl.proxy.codec import Codec, Message, Uint64

_METADATA = Meta(max_length=64 << 20)


class Card(Message, frozen=True):
    """The description of a holder that other holders connect with.

    Attributes:
        metadata: the metadata of the holder's agent.
        holder: a number that no other holder has, including later holders of an agent of this name.
        version_address: the address of two 64-bit words. The first is the version that others may read now, or 0 for
            none; the second is `holder`, or 0 once the holder is closed.
        parts: the holder's parts of tensors.
        groups: the index of each group's first part.
    """

    format: Literal["proxyccl-weights-2"]
    metadata: Annotated[bytes, _METADATA]
    holder: Uint64
    version_address: Uint64
    parts: list[Part]
    groups: list[Uint64]


class Join(Message, frozen=True, tag="join"):
    """Asks a holder to announce its versions, and to wait until the sender has read them. `metadata` are the metadata
    of the sender's agent, `holder` is the sender's number.
    """

    metadata: Annotated[bytes, _METADATA]
    holder: Uint64


class Offered(Message, frozen=True, tag="offered"):
    """Tells a reader to read the sender's version word again."""


class HasRead(Message, frozen=True, tag="read"):
    """Tells a holder that the sender, whose number is `holder`, has read the receiver's parts of this version."""

    version: Uint64
    holder: Uint64


class Leave(Message, frozen=True, tag="leave"):
    """Tells a holder that the sender, whose number is `holder`, will not read further versions."""

    holder: Uint64


CARD = Codec(Card, 512 << 20, "card of weights", MetadataError)
MESSAGE: Codec[Join | Offered | HasRead | Leave] = Codec(
    Join | Offered | HasRead | Leave, 65 << 20, name="message about weights"
)


def tensors_of(cards: Iterable[bytes]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Returns the tensors that holders have parts of: (shape, name of the element type) by name, in the cards' order.

    Raises:
        MetadataError: bytes are not a card.
    """
    parts = (part for card in cards for part in CARD.decode(card, "a holder of weights").parts)
    return {part.tensor: (part.size, part.dtype) for part in parts}
