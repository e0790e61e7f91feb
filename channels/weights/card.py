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
        version_address: of the word that says which version others may read now, of 64 bits; 0: none.
        parts: of tensors.
        groups: the index of each group's first part.
    """

    format: Literal["proxyccl-weights-1"]
    metadata: Annotated[bytes, _METADATA]
    version_address: Uint64
    parts: list[Part]
    groups: list[Uint64]


class Join(Message, frozen=True, tag="join"):
    """To a holder: tell me of your versions, and wait until I have read them. `metadata` are the sender's."""

    metadata: Annotated[bytes, _METADATA]


class Offered(Message, frozen=True, tag="offered"):
    """To a reader: look at my version."""


class HasRead(Message, frozen=True, tag="read"):
    """To a holder: I have all that I read of this version."""

    version: Uint64


class Leave(Message, frozen=True, tag="leave"):
    """To a holder: the sender will not read further versions of it."""


Said = Join | Offered | HasRead | Leave

_CARD = Codec(Card, 512 << 20, name="card of weights")
_MESSAGE: Codec[Said] = Codec(Join | Offered | HasRead | Leave, 65 << 20, name="message about weights")


def encode_card(card: Card) -> bytes:
    """A card as bytes."""
    return _CARD.encode(card)


def decode_card(data: bytes) -> Card:
    """The card of bytes.

    Raises:
        MetadataError: they are not a card, or not of this version.
    """
    try:
        return _CARD.decode(data, "a holder of weights")
    except ProtocolError as error:
        raise MetadataError(str(error)) from None


def encode(message: Said) -> bytes:
    """A message as bytes."""
    return _MESSAGE.encode(message)


def decode(data: bytes, sender: str) -> Said:
    """The message of bytes.

    Raises:
        ProtocolError: they are not one.
    """
    return _MESSAGE.decode(data, f"agent {sender}")


def tensors_of(cards: Iterable[bytes]) -> dict[str, tuple[tuple[int, ...], str]]:
    """The tensors that holders have parts of: (shape, name of the element type) by name, in the cards' order.

    Raises:
        MetadataError: a card is not one.
    """
    parts = (part for card in cards for part in decode_card(card).parts)
    return {part.tensor: (part.size, part.dtype) for part in parts}
