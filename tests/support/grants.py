"""Two agents, one of which grants its memory to the other, and transfers that stay active until they are released."""

from __future__ import annotations

import time
from functools import cache
from typing import Any

import numpy as np
import pytest

from proxyccl import Runtime
from proxyccl.channels.transfers import agent as agent_module
from proxyccl.device.arrays.array import Array
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.transfer import Agent, Grant, Transfer, shared_empty
from support.agents import force_path
from support.devices import rank_runtime
from support.stream_words import wait_value, write_value

BLOCKS, NBYTES = 8, 1 << 12


class Sides:
    """An owner with BLOCKS blocks of `nbytes` bytes, and a reader that has added the owner."""

    def __init__(self, path: str, *, far: bool = False, nbytes: int = NBYTES, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes, self.far = nbytes, far
        if far:  # a peer of another host can't map the ledger
            monkeypatch.setattr(agent_module, "_open_ledger", lambda place: (None, "it is on another host"))
        self.owner, self.reader = Agent("owner", listen=["127.0.0.1"]), Agent("reader", listen=["127.0.0.1"])
        if path != "shared_memory":
            force_path(self.reader, path)
        allocate: Any = shared_empty if path == "shared_memory" else np.zeros
        self.memory = allocate(BLOCKS * nbytes, np.uint8)
        self.memory[:] = np.arange(len(self.memory)) % 251
        self.target = np.zeros_like(self.memory)
        self.there, self.here = self.owner.register(self.memory), self.reader.register(self.target)
        self.reader.add(self.owner.metadata())

    def address(self, block: int) -> int:
        return self.there.address + block * self.nbytes

    def grant(self, blocks: int = BLOCKS, **options: Any) -> Grant:
        return self.owner.grant([(self.address(block), self.nbytes) for block in range(blocks)], **options)

    def rows(self, *blocks: int) -> list[tuple[int, int, int]]:
        return [(self.here.address + block * self.nbytes, self.address(block), self.nbytes) for block in blocks]

    def close(self) -> None:
        self.owner.close()
        self.reader.close()


@cache
def one_runtime() -> Runtime:
    return rank_runtime(0)


class Held:
    """A started transfer, which stays active until `release`: a stream that waits for a word starts its copies. If the
    owner's ledger can't be mapped, the copies are complete and only the check of the grant is left, because nobody has
    asked for the state.
    """

    def __init__(self, agent: Agent, transfer: Transfer, *, far: bool = False, message: bytes | None = None) -> None:
        self.transfer, self._far, self._runtime = transfer, far, one_runtime()
        agent.register(Array(self._runtime, self._runtime.allocate(8), (8,), as_dtype("uint8")))  # to use its streams
        self._gate = self._runtime.allocate_pinned(8)
        if far:
            transfer.start(message)
            while not transfer.times.ended:
                time.sleep(1e-4)
        else:
            self._stream = self._runtime.create_stream()
            wait_value(self._runtime, self._gate.ptr, 1, self._stream)
            transfer.start(message, stream=self._stream)

    def release(self) -> None:
        if not self._far:
            write_value(self._runtime, self._gate.ptr, 1, self._runtime.create_stream())
            self._stream.synchronize()


def messages_of(sides: Sides) -> list[bytes]:
    """Returns the reader's messages to the owner."""
    sides.reader.notify("owner", b"last")
    messages: list[bytes] = []
    while b"last" not in messages:
        sides.owner.wait_for_message(10.0)
        messages += (message for _, message in sides.owner.messages())
    return messages[:-1]
