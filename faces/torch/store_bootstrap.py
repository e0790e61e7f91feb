"""Implements a bootstrap and a barrier over a torch.distributed store: TCPStore, FileStore or HashStore.

The barrier (`monitored_barrier`) needs no communicator, so it works even while a communicator is stuck.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from proxyccl.channels.joining.boards import BoardBootstrap
from proxyccl.channels.joining.bootstrap import require_place
from proxyccl.channels.joining.survivors import Board, NoteBoard
from proxyccl.device.errors import ClosedError, PeerLostError
from torch.distributed import DistError, PrefixStore

_BARRIER_PAUSE_SECONDS = 0.002


class StoreBootstrap(BoardBootstrap):
    """A `Bootstrap` over a store. All ranks pass the same store or PrefixStore, which must have no other user.

    Args:
        store: the store. rank: this rank's number.
        world_size: number of ranks.

    Raises:
        ArgumentError: the rank is not below world_size.
    """

    where, longest_pause = "torch's store", 0.02

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        super().__init__(*require_place(rank, world_size))
        self._open_store = store

    def all_gather(self, data: bytes, timeout: float, give_up: Callable[[], None]) -> list[bytes]:
        """See `Bootstrap.all_gather`. Also raises PeerLostError if the store can't be reached, and ExchangeError if the
        store contains an invalid bundle.
        """
        try:
            return super().all_gather(data, timeout, give_up)
        except ClosedError:
            give_up()  # may raise the caller's error, which names the closed object more precisely
            raise
        except DistError as error:
            give_up()
            raise PeerLostError(
                f"the bootstrap's all_gather over torch's store: {error}", rank=self.rank, operation="bootstrap"
            ) from error

    def subset(self, members: Sequence[int], key: int) -> StoreBootstrap:
        members = list(members)
        return StoreBootstrap(PrefixStore(f"subset-{key:x}", self._store), members.index(self.rank), len(members))

    def withdraw(self) -> None:
        with contextlib.suppress(DistError):  # if the store has failed, the next use of the store raises the error
            super().withdraw()

    def board(self) -> Board:
        """Returns the bootstrap's board (see `Bootstrap`). The store holds the board's data, so the board works as long
        as the rank that serves the store runs.
        """
        return NoteBoard(_Notes(PrefixStore("board", self._store)), self.rank)

    def close(self) -> None:
        """Ends the bootstrap's use, and drops its reference to the store, which closes with its last reference."""
        self._open_store = None

    @property
    def _store(self) -> Any:
        store = self._open_store
        if store is None:
            raise ClosedError("the bootstrap over torch's store was closed")
        return store

    def _put(self, number: int, of: str, data: bytes, readers: Sequence[int]) -> None:
        self._store.set(f"{number}/{of}", data)

    def _get(self, number: int, names: Sequence[str]) -> dict[str, bytes]:
        # The store's own wait would block the store's connection for other threads.
        store, keys = self._store, [f"{number}/{name}" for name in names]
        if not keys or not store.check(keys):
            return {}
        values = store.multi_get(keys) if store.has_extended_api() else map(store.get, keys)
        return dict(zip(names, map(bytes, values), strict=True))

    def _remove(self, number: int, of: str) -> None:
        if number >= 0:
            self._store.delete_key(f"{number}/{of}")


class _Notes:
    """Keeps a board's notes in a store. A note is stored as "=" and hexadecimal digits, because `compare_set` takes
    only text, and may treat empty text as a missing key.
    """

    def __init__(self, store: Any) -> None:
        self._store = store

    def write_once(self, name: str, data: bytes) -> None:
        self._store.compare_set(name, "", f"={data.hex()}")

    def read(self, name: str) -> bytes | None:
        return bytes.fromhex(self._store.get(name).decode()[1:]) if self._store.check([name]) else None


def monitored_barrier(
    store: Any, number: int, rank: int, world_size: int, seconds: float, *, wait_all_ranks: bool
) -> None:
    """Waits until all ranks have called this function.

    Programs search for the error messages of torch's gloo backend, so this function uses the same messages. `number`
    identifies this barrier and is the same on all ranks. With `wait_all_ranks`, rank 0 waits until the time-out and
    then names all missing ranks; without it, rank 0 names only the first.
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
