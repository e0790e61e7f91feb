"""Ranks that meet through a torch.distributed store: TCPStore, FileStore or HashStore. No MPI is involved.

The monitored barrier needs no communicator, so it works when one is stuck.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from proxyccl.channels.joining.bootstrap import require_place
from proxyccl.channels.joining.bundles import COLLECTED_FROM, bundle, unbundle
from proxyccl.channels.joining.survivors import Board
from proxyccl.channels.segment.rendezvous import ranks_missing
from proxyccl.device.errors import ClosedError, PeerLostError, WaitTimeoutError
from torch.distributed import DistError, PrefixStore

_FIRST_PAUSE_SECONDS = 2e-4
_LONGEST_PAUSE_SECONDS = 0.02
_BARRIER_PAUSE_SECONDS = 0.002


class StoreBootstrap:
    """A `Bootstrap` over a store. All ranks pass the same store, or a prefix of it that is used only for this.

    Args:
        store: the store.
        rank: this rank's number.
        world_size: number of ranks.

    Raises:
        ArgumentError: the rank does not fit.
    """

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.rank, self.world_size = require_place(rank, world_size)
        self._open_store: Any = store
        self._round = 0
        self._lock = threading.Lock()

    @property
    def _store(self) -> Any:
        store = self._open_store
        if store is None:
            raise ClosedError("the bootstrap over torch's store was closed")
        return store

    def all_gather(self, data: bytes, timeout: float, give_up: Callable[[], None]) -> list[bytes]:
        """See `Bootstrap.all_gather`. Also raises PeerLostError if the store is gone, and ExchangeError if a bundle in
        it is not one."""
        with self._lock:
            number, self._round = self._round, self._round + 1
        keys = [f"{number}/{rank}" for rank in range(self.world_size)]
        deadline = time.monotonic() + timeout
        collected = self.world_size >= COLLECTED_FROM
        try:
            self._store.set(keys[self.rank], data)
            if collected and self.rank:
                self._await([_bundle_key(number)], keys, deadline, give_up)
                bundled = bytes(self._store.get(_bundle_key(number)))
                everyone = unbundle(bundled, self.world_size, "torch's store", self.rank)
            else:
                self._await(keys, keys, deadline, give_up)
                everyone = self._fetch(keys)
                if collected:
                    self._store.set(_bundle_key(number), bundle(everyone))
            if number >= 2:  # all ranks have reached the round before this one, so they have read the one before that
                self._store.delete_key(f"{number - 2}/{self.rank}")
                if collected and not self.rank:
                    self._store.delete_key(_bundle_key(number - 2))
        except ClosedError:
            give_up()  # the user of the bootstrap tells better what has ended
            raise
        except DistError as error:
            give_up()
            raise PeerLostError(
                f"the bootstrap's all_gather over torch's store: {error}", rank=self.rank, operation="bootstrap"
            ) from error
        return everyone

    def _await(self, awaited: list[str], keys: list[str], deadline: float, give_up: Callable[[], None]) -> None:
        pause = _FIRST_PAUSE_SECONDS
        # The store's own wait would hold its connection, which other threads need meanwhile.
        while not self._store.check(awaited):
            give_up()
            if time.monotonic() > deadline:
                raise self._late(keys)
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_SECONDS)

    def _fetch(self, keys: list[str]) -> list[bytes]:
        if self._store.has_extended_api():
            return [bytes(value) for value in self._store.multi_get(keys)]
        return [bytes(self._store.get(key)) for key in keys]

    def _late(self, keys: list[str]) -> WaitTimeoutError:
        missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])] or [0]  # it made no bundle
        return ranks_missing("the bootstrap's all_gather over torch's store", missing, self.rank)

    def subset(self, members: Sequence[int], key: int) -> StoreBootstrap:
        members = list(members)
        return StoreBootstrap(PrefixStore(f"subset-{key:x}", self._store), members.index(self.rank), len(members))

    def withdraw(self) -> None:
        with contextlib.suppress(DistError):  # whoever uses the store next learns that it is gone
            for number in range(self._round):
                self._store.delete_key(f"{number}/{self.rank}")
                if not self.rank:
                    self._store.delete_key(_bundle_key(number))

    def board(self) -> Board:
        """A board in the store, which outlives the ranks that do not serve it. See `Bootstrap`."""
        return _StoreBoard(PrefixStore("board", self._store), self.rank)

    def close(self) -> None:
        """Lets go of the store, which belongs to the caller: it ends when all have let go of it. No call may follow."""
        self._open_store = None


def _bundle_key(number: int) -> str:
    return f"{number}/all"


class _StoreBoard:
    def __init__(self, store: Any, rank: int) -> None:
        self._store, self._rank = store, rank

    def post(self, number: int, note: bytes) -> None:
        self._store.set(f"note-{number}-{self._rank}", note)

    def read(self, rank: int, number: int) -> bytes | None:
        return self._get(f"note-{number}-{rank}")

    def settle(self, number: int, answer: bytes) -> bytes:
        # Stores compare text.
        return bytes.fromhex(self._store.compare_set(f"answer-{number}", "", answer.hex()).decode())

    def settled(self, number: int) -> bytes | None:
        answer = self._get(f"answer-{number}")
        return None if answer is None else bytes.fromhex(answer.decode())

    def _get(self, key: str) -> bytes | None:
        return bytes(self._store.get(key)) if self._store.check([key]) else None


def monitored_barrier(
    store: Any, number: int, rank: int, world_size: int, seconds: float, *, wait_all_ranks: bool
) -> None:
    """Waits until all ranks have arrived: rank 0 waits for the others and releases them.

    torch's gloo backend does the same; programs search for its messages. The barrier's number is the same on all ranks.
    With `wait_all_ranks` rank 0 waits for the time-out to name all missing ranks, and not only the first.
    """
    deadline = time.monotonic() + seconds
    milliseconds = round(1000 * seconds)
    if rank:
        store.set(f"{number}/{rank}", b"")
        if not _wait(store, f"{number}/go", deadline):
            raise RuntimeError(
                f"[Rank {rank}]: Rank {rank} successfully reached monitoredBarrier, but received errors while waiting "
                f"for send/recv from rank 0 within {milliseconds} ms. Please check rank 0 logs for faulty rank."
            )
        return
    if seconds <= 0:
        raise RuntimeError(f"[Rank 0]: Rank 0 timed out in monitoredBarrier after {milliseconds} ms")
    missing = []
    for peer in range(1, world_size):
        if not _wait(store, f"{number}/{peer}", deadline):
            missing.append(peer)
            if not wait_all_ranks:
                raise RuntimeError(f"[Rank 0]: Rank {peer} failed to pass monitoredBarrier in {milliseconds} ms")
    if missing:
        ranks = ", ".join(map(str, missing))
        raise RuntimeError(f"[Rank 0]: Ranks {ranks} failed to pass monitoredBarrier in {milliseconds} ms")
    store.set(f"{number}/go", b"")


def _wait(store: Any, key: str, deadline: float) -> bool:
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(_BARRIER_PAUSE_SECONDS)
    return True
