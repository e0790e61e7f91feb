"""Pinned memory of each rank through which its schedules send and receive little: the proxies' CPUs copy it."""

from __future__ import annotations

from typing import ClassVar

from proxyccl.channels.group import Group
from proxyccl.device.runtime import PinnedMemory
from proxyccl.proxy._engine import lib
from proxyccl.proxy.codec import Codec

_HANDLE = Codec(bytes, 64 << 10, "memory handle")
_IDS = Codec[dict[int, int]](dict[int, int], 1 << 20, name="memory ids of pinned memory")
_OFFSETS = {"source": 0, "target": lib.PROXYCCL_CPU_COPY_BYTES, "scratch": lib.PROXYCCL_CPU_COPY_BYTES}


class PinnedBoxes:
    """A box to send from and one to receive in, of `BYTES` bytes each. All ranks of a host make them together.

    Args:
        group: the ranks.

    Attributes:
        ptr: the device's address of the first one.
    """

    BYTES: ClassVar[int] = lib.PROXYCCL_CPU_COPY_BYTES

    def __init__(self, group: Group) -> None:
        proxy = group.links.proxy
        self._memory = group.runtime.allocate_pinned(2 * self.BYTES)
        self.ptr = self._memory.ptr
        self._own = proxy.add_pinned_memory(self._memory)
        handles = group.exchange.all_gather(self._memory.handle, _HANDLE, "pinned memory of schedules")
        self._theirs: dict[int, PinnedMemory] = {}
        for peer, handle in enumerate(handles):
            if peer != group.rank:
                with group.mapping_of(peer):
                    self._theirs[peer] = group.runtime.open_pinned(handle)
        ids = {peer: proxy.add_pinned_memory(memory) for peer, memory in self._theirs.items()}
        answers = group.exchange.all_gather(ids, _IDS, "ids of pinned memory of schedules")
        self._at_peers = {peer: answers[peer][group.rank] for peer in ids}

    @staticmethod
    def offset(side: str) -> int:
        """Where the box for a side begins. One side of a schedule receives, so all that receive share one."""
        return _OFFSETS[side]

    def source_id(self, peer: int) -> int:
        """The memory id in this rank's proxy."""
        return self._own

    def id_at(self, peer: int) -> int:
        """The memory id in a peer's proxy."""
        return self._at_peers[peer]

    def close(self) -> None:
        """Unmaps them. No schedule of any rank may use them any more."""
        for memory in (self._memory, *self._theirs.values()):
            memory.close()
