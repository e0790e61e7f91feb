"""The bytes that describe a holder, and the messages between holders."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta

from proxyccl.channels.transfers.errors import MetadataError
from proxyccl.channels.weights.parts import Part
from proxyccl.proxy.codec import Codec, Message, ProtocolError, Uint64

_METADATA = Meta(max_length=64 << 20)


class Card(Message, frozen=True):
    """A holder.

    Attributes:
        metadata: its agent's.
        holder: a number that no other holder has, also none that an agent of this name makes later.
        version_address: of two words of 64 bits: the version that others may read now, 0: none; and `holder`, until it
            is closed.
        parts: of tensors.
        groups: the index of each group's first part.
    """

    format: Literal["proxyccl-weights-2"]
    metadata: Annotated[bytes, _METADATA]
    holder: Uint64
    version_address: Uint64
    parts: list[Part]
    groups: list[Uint64]


class Join(Message, frozen=True, tag="join"):
    """To a holder: tell me of your versions, and wait until I have read them. `metadata` are the sender's agent's,
    `holder` is its number."""

    metadata: Annotated[bytes, _METADATA]
    holder: Uint64


class Offered(Message, frozen=True, tag="offered"):
    """To a reader: look at my version."""


class HasRead(Message, frozen=True, tag="read"):
    """To a holder: I, the holder of this number, have all that I read of this version."""

    version: Uint64
    holder: Uint64


class Leave(Message, frozen=True, tag="leave"):
    """To a holder: the sender, of this number, will not read further versions of it."""

    holder: Uint64


CARD = Codec(Card, 512 << 20, name="card of weights")
MESSAGE: Codec[Join | Offered | HasRead | Leave] = Codec(
    Join | Offered | HasRead | Leave, 65 << 20, name="message about weights"
)


def decode_card(data: bytes) -> Card:
    """The card of bytes.

    Raises:
        MetadataError: they are not a card, or not of this version.
    """
    try:
        return CARD.decode(data, "a holder of weights")
    except ProtocolError as error:
        raise MetadataError(str(error)) from None


def tensors_of(cards: Iterable[bytes]) -> dict[str, tuple[tuple[int, ...], str]]:
    """The tensors that holders have parts of: (shape, name of the element type) by name, in the cards' order.

    Raises:
        MetadataError: a card is not one.
    """
    parts = (part for card in cards for part in decode_card(card).parts)
    return {part.tensor: (part.size, part.dtype) for part in parts}
