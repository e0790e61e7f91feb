"""Rows that each rank of a host stores in pinned memory, and that every rank reads by their numbers.

They lie in the CPU's memory, as there may be more of them than a device has room for. A kernel reads them, since the
numbers are known only on the device. No rank takes part in another one's reads.
"""

from __future__ import annotations

from proxyccl.channels.group import Group
from proxyccl.channels.memory import allocate
from proxyccl.device.arrays.array import ArrayView
from proxyccl.device.errors import ArgumentError
from proxyccl.device.runtime import PinnedMemory, StreamLike
from proxyccl.proxy.codec import Codec, Message, Uint64

_THREADS = 256
_LANES = 32  # that read a row
_MOST_BLOCKS = 1024


class _Offer(Message, frozen=True):
    """A rank's description of its memory: its size and the handle that maps it."""

    nbytes: Uint64
    handle: bytes


class _Rows(Message, frozen=True):
    """The rows that a rank has written: their number, and the bytes of each."""

    entries: Uint64
    row_bytes: Uint64


_OFFER = Codec(_Offer, 64 << 10, "memory of rows")
_ROWS = Codec(_Rows, 64, "rows")


class StoredRows:
    """The rows of all ranks, which make it together.

    Args:
        group: ranks of one host.
        nbytes: of this rank's memory.

    Attributes:
        entries: rows that each rank has written; 0 before the first `write`.
        row_bytes: bytes of each.

    Raises:
        ResourceError: the host has no room.
    """

    def __init__(self, group: Group, nbytes: int) -> None:
        self._group, self.nbytes = group, nbytes
        self.entries = self.row_bytes = 0
        self._memory = group.runtime.allocate_pinned(nbytes)
        offers = group.exchange.all_gather(_Offer(nbytes, self._memory.handle), _OFFER, "memory of rows")
        self._peers: list[PinnedMemory] = []
        stores = [self._memory.ptr]
        for step in range(1, group.world_size):
            peer = (group.rank + step) % group.world_size
            with group.mapping_of(peer):
                self._peers.append(group.runtime.open_pinned(offers[peer].handle))
            stores.append(self._peers[-1].ptr)
        by_rank = [stores[(rank - group.rank) % group.world_size] for rank in range(group.world_size)]
        self._stores = allocate(group, group.world_size, "uint64").upload(by_rank)
        group.exchange.barrier("memory of rows: all have mapped it")

    def write(self, view: ArrayView, row_bytes: int) -> None:
        """Replaces this rank's rows. All ranks call it together; it waits for their queued work before and after.

        Args:
            view: whole rows, as many of as many bytes as those of the other ranks.
            row_bytes: of each row.

        Raises:
            ArgumentError: ranks disagree about the rows, or they do not fit. Nothing was written.
        """
        group = self._group
        if view.nbytes > self.nbytes:
            raise ArgumentError("storage", f"has {view.nbytes} bytes; expected at most num_cpu_bytes, {self.nbytes}")
        group.synchronize()
        own = _Rows(view.nbytes // row_bytes, row_bytes)
        for rank, other in enumerate(group.exchange.all_gather(own, _ROWS, "rows: all have ended their reads")):
            if other != own:
                raise ArgumentError(
                    "storage",
                    f"has {own.entries} rows of {own.row_bytes} bytes; rank {rank} has {other.entries} of "
                    f"{other.row_bytes}",
                )
        group.runtime.copy(self._memory.ptr, view.ptr, view.nbytes)
        self.entries, self.row_bytes = own.entries, own.row_bytes
        group.exchange.barrier("rows: all have written theirs")

    def fetch(self, indices: ArrayView, out: ArrayView, stream: StreamLike) -> None:
        """Reads rows by their numbers, in one kernel.

        Args:
            indices: int32. Row n of rank r has number r * `entries` + n. A number without a row gives zeros.
            out: as many rows.
            stream: where it runs; None on the host runtime, where it has ended when this returns.

        Raises:
            CommunicatorError: the group has failed.
        """
        if not indices.size:
            return
        group = self._group
        blocks = min(-(-indices.size * _LANES // _THREADS), _MOST_BLOCKS) if group.runtime.name != "host" else 1
        threads = _THREADS if group.runtime.name != "host" else 1
        launch = group.runtime.shipped("engram_fetch.h", "engram_fetch_impl").prepare(
            blocks,
            threads,
            self._stores,
            group.world_size,
            self.entries,
            self.row_bytes,
            indices.ptr,
            indices.size,
            out.ptr,
        )
        group.launches.launch(launch, stream, (indices.owner, out.owner))

    def close(self) -> None:
        """Frees the memory. No work of any rank may still use it."""
        for memory in (self._memory, *self._peers):
            memory.close()
        self._stores.free()
