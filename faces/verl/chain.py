"""A worker's links in the chain along which buckets are sent, from the trainer through all rollout workers.

Each bucket is sent over each link once. A worker has memory for two buckets: the worker reads the next bucket into one
half, while the following worker and the worker's own model read from the other half.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta

from proxyccl.channels.transfers.agent import Agent
from proxyccl.channels.transfers.errors import DisconnectedError, TransferTimeoutError
from proxyccl.channels.transfers.regions import Region
from proxyccl.proxy.codec import Codec, Message, Uint64

_SLICE = 0.05
"""The interval of checks for a lost neighbour, because a lost neighbour does not wake a wait for messages."""


class Piece(Message, frozen=True):
    """A weight in a bucket, or a part of a weight that is longer than a bucket."""

    name: Annotated[str, Meta(max_length=4096)]  # the weight's name
    dtype: Annotated[str, Meta(max_length=64)]  # torch's name of the element type
    shape: Annotated[list[Uint64], Meta(max_length=64)]  # the shape of the whole weight
    first: Uint64  # the piece's offset in the weight, in bytes
    # The piece's offset in the bucket and the piece's size, both in bytes.
    offset: Uint64
    nbytes: Uint64


class Bucket(Message, frozen=True, tag="bucket"):
    """A message that a bucket is ready, from a worker to the following worker."""

    number: Uint64  # the bucket's number, from 0
    # The bucket's address in the sender's memory and its size in bytes.
    address: Uint64
    nbytes: Uint64
    pieces: list[Piece]  # the bucket's contents
    last: bool  # whether this is the last bucket


class HasRead(Message, frozen=True, tag="read"):
    """A message that a bucket's memory may be reused, from a worker that has read the bucket to the previous worker."""

    number: Uint64


_CODEC: Codec[Bucket | HasRead] = Codec(Bucket | HasRead, 64 << 20, name="message of a checkpoint engine")


class Chain:
    """A worker's links to the previous and the following worker of the chain. `previous` and `following` are the
    metadata of these workers' agents, or None at an end of the chain. This object takes all messages of `agent`.
    """

    def __init__(
        self, agent: Agent, buckets: tuple[Region, Region], previous: bytes | None, following: bytes | None
    ) -> None:
        self._agent, self._buckets = agent, buckets
        self._previous = None if previous is None else agent.add(previous)
        self._following = None if following is None else agent.add(following)
        self._arrived: dict[int, Bucket] = {}
        self._read = -1  # the number of the last bucket that the following worker has read

    async def until_free(self, number: int) -> None:
        """Waits until the following worker has read the earlier bucket in the memory for bucket `number`.

        Raises:
            DisconnectedError: a neighbour has ended, or has closed its agent. The error's `peer` is the neighbour's
                name.
            TransferTimeoutError: the following worker did not read the earlier bucket within the agent's time-out.
        """
        if self._following is not None:
            await self._until(lambda: self._read >= number - len(self._buckets), f"{self._following} to read a bucket")

    def offer(self, number: int, nbytes: int, pieces: list[Piece], *, last: bool) -> None:
        """Tells the next worker that a bucket can be read. Raises DisconnectedError if its agent has ended."""
        if self._following is not None:
            address = self._buckets[number % 2].address
            self._agent.notify(self._following, _CODEC.encode(Bucket(number, address, nbytes, pieces, last)))

    async def fetch(self, number: int) -> Bucket:
        """Reads a bucket from the previous worker, and offers it to the next. Raises `until_free`'s errors."""
        previous = self._previous
        assert previous is not None
        await self._until(lambda: number in self._arrived, f"a bucket of {previous}")
        bucket = self._arrived.pop(number)
        await self.until_free(number)
        if bucket.nbytes:
            blocks = [(self._buckets[number % 2].address, bucket.address, bucket.nbytes)]
            transfer = self._agent.prepare("read", previous, blocks)
            transfer.start(_CODEC.encode(HasRead(number)))
            await asyncio.to_thread(transfer.wait, self._agent.timeout)
        else:
            self._agent.notify(previous, _CODEC.encode(HasRead(number)))
        self.offer(number, bucket.nbytes, bucket.pieces, last=bucket.last)
        return bucket

    async def _until(self, met: Callable[[], bool], expected: str) -> None:
        deadline = time.monotonic() + self._agent.timeout
        while not self._take(met):
            for name in (self._previous, self._following):
                if name is not None and (reason := self._agent.lost(name)):
                    raise DisconnectedError(f"agent {name}: {reason}", name)
            if time.monotonic() > deadline:
                raise TransferTimeoutError(f"waited for {expected} for {self._agent.timeout:g} s")
            await asyncio.to_thread(self._wait_for_message)

    def _take(self, met: Callable[[], bool]) -> bool:
        for sender, data in self._agent.messages():
            match _CODEC.decode(data, f"agent {sender}"):
                case Bucket() as bucket if sender == self._previous:
                    self._arrived[bucket.number] = bucket
                case HasRead(number) if sender == self._following:
                    self._read = max(self._read, number)
        return met()

    def _wait_for_message(self) -> None:
        try:
            self._agent.wait_for_message(_SLICE)
        except TransferTimeoutError:
            return  # `_until` then checks its deadline and the neighbours
