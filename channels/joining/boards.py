"""All-gathers over a board: storage in which ranks put and get messages, such as files, a torch store, MPI or a dict.

In each round a rank puts its message on the board and gets the other ranks' messages. If each of n ranks got n
messages, the number of requests would be quadratic. From COLLECTED_FROM ranks on, rank 0 therefore gets all messages
and offers them as one bundle, which takes 3 n requests. With fewer ranks the bundle would cost more than it saves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from proxyccl.channels.segment.rendezvous import ranks_missing, wait_at_most
from proxyccl.device.errors import ExchangeError

COLLECTED_FROM = 16
BUNDLE = "all"
"""The name of the first rank's bundle, in place of a rank's number."""


class BoardBootstrap:
    """A `Bootstrap` over a board. Subclasses implement the board. A message's key is the number of the all-gather (the
    round) and the sender's rank, or `BUNDLE`.
    """

    where = ""  # the board's name in error texts
    is_shared = True  # whether each rank can get any message; otherwise a rank gets only messages addressed to it
    longest_pause = 1e-3  # the longest time between a waiting rank's polls of the board, in seconds

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._others = [peer for peer in range(world_size) if peer != rank]
        self._round = 0
        self._lock = threading.Lock()

    def _put(self, number: int, of: str, data: bytes, readers: Sequence[int]) -> None:
        """Puts a message of this rank on the board, without waiting for readers."""
        raise NotImplementedError

    def _get(self, number: int, names: Sequence[str]) -> dict[str, bytes]:
        """Returns, by name, the messages of round `number` that have arrived. The result may be empty until all
        messages have arrived."""
        raise NotImplementedError

    def _remove(self, number: int, of: str) -> None:
        """Removes a message of this rank, if the message exists."""
        raise NotImplementedError

    def all_gather(self, data: bytes, timeout: float, give_up: Callable[[], None]) -> list[bytes]:
        """See `Bootstrap.all_gather`. Also raises ExchangeError if rank 0's bundle is invalid, and the errors of the
        board's methods."""
        deadline = time.monotonic() + timeout
        with self._lock:
            number, self._round = self._round, self._round + 1
        own, others = str(self.rank), self._others
        collected = self.world_size >= COLLECTED_FROM
        self._put(number, own, data, others if not collected else [0] if self.rank else [])
        if collected and self.rank:
            bundled = self._await(number, [BUNDLE], deadline, give_up)[BUNDLE]
            everyone = unbundle(bundled, self.world_size, self.where, self.rank)
        else:
            found = self._await(number, [str(peer) for peer in others], deadline, give_up)
            everyone = [data if rank == self.rank else found[str(rank)] for rank in range(self.world_size)]
            if collected:
                self._put(number, BUNDLE, bundle(everyone), others)
                self._remove(number - 2, BUNDLE)
        # All ranks have begun round `number - 1`, so they have read all messages of round `number - 2`.
        self._remove(number - 2, own)
        return everyone

    def _await(
        self, number: int, names: Sequence[str], deadline: float, give_up: Callable[[], None]
    ) -> dict[str, bytes]:
        found: dict[str, bytes] = {}

        def look() -> bool:
            found.update(self._get(number, [name for name in names if name not in found]))
            return len(found) == len(names)

        if not wait_at_most(look, deadline, give_up, self.longest_pause):
            sought = self._others if self.is_shared or BUNDLE not in names else [0]
            missing = [r for r in sought if str(r) not in found and not self._get(number, [str(r)])]
            over = f" over {self.where}" if self.where else ""
            # If no rank's message is missing, the first rank's bundle is missing.
            raise ranks_missing(f"the bootstrap's all_gather{over}", missing or [0], self.rank)
        return found

    def withdraw(self) -> None:
        """See `Bootstrap`."""
        for number in range(self._round):
            self._remove(number, str(self.rank))
            if not self.rank:
                self._remove(number, BUNDLE)

    def close(self) -> None:
        """Frees nothing, because the board outlives the bootstrap."""


def bundle(messages: Sequence[bytes]) -> bytes:
    return msgspec.msgpack.encode(messages)


def unbundle(data: bytes, world_size: int, where: str, rank: int) -> list[bytes]:
    """Unpacks the messages of `world_size` ranks. Errors name the board by `where`, and this rank by `rank`.

    Raises:
        ExchangeError: `data` is not a bundle of `world_size` messages.
    """
    try:
        messages = msgspec.msgpack.decode(data, type=list[bytes])
    except msgspec.DecodeError:
        messages = []
    if len(messages) != world_size:
        raise ExchangeError(
            f"rank 0's message in {where} can't be read: expected the messages of {world_size} ranks, not these "
            f"{len(data)} bytes",
            rank=rank,
            peer=0,
            operation="bootstrap",
        )
    return messages
