"""The messages between the workers of a chain."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from proxyccl.proxy.codec import Codec, Message, Uint64


class Piece(Message, frozen=True):
    """A weight in a bucket, or a part of one that is longer than a bucket.

    Attributes:
        name: the weight's.
        dtype: name of its element type in torch.
        shape: of the whole weight.
        first: the weight's byte that comes first.
        offset, nbytes: where it lies in the bucket.
    """

    name: Annotated[str, Meta(max_length=4096)]
    dtype: Annotated[str, Meta(max_length=64)]
    shape: Annotated[list[Uint64], Meta(max_length=64)]
    first: Uint64
    offset: Uint64
    nbytes: Uint64


class Bucket(Message, frozen=True, tag="bucket"):
    """To the following worker: read this.

    Attributes:
        number: of the bucket, from 0.
        address, nbytes: where it lies in the sender's memory.
        pieces: its contents.
        last: whether no other bucket follows.
    """

    number: Uint64
    address: Uint64
    nbytes: Uint64
    pieces: list[Piece]
    last: bool


class HasRead(Message, frozen=True, tag="read"):
    """To the previous worker: its memory of the bucket of this number is free."""

    number: Uint64


_CODEC: Codec[Bucket | HasRead] = Codec(Bucket | HasRead, 64 << 20, name="message of a checkpoint engine")


def encode(message: Bucket | HasRead) -> bytes:
    """A message as bytes."""
    return _CODEC.encode(message)


def decode(data: bytes, sender: str) -> Bucket | HasRead:
    """The message of bytes.

    Raises:
        ProtocolError: they are not one.
    """
    return _CODEC.decode(data, f"agent {sender}")
