"""Pinned memory of each rank through which its schedules send and receive little: the proxies' CPUs copy it."""

from __future__ import annotations

from typing import ClassVar

from proxyccl.channels.group import Group
from proxyccl.channels.pinned_memory import PinnedRange
from proxyccl.proxy.codec import Codec

_IDS = Codec[dict[int, int]](dict[int, int], 1 << 20, name="memory ids of pinned memory")
_BYTES = 256 << 10
_OFFSETS = {"source": 0, "target": _BYTES, "scratch": _BYTES}


class PinnedBoxes:
    """A box to send from and one to receive in, of `BYTES` bytes each. All ranks make them together.

    Args:
        group: the ranks.

    Attributes:
        ptr: the device's address of the first one.
    """

    BYTES: ClassVar[int] = _BYTES

    def __init__(self, group: Group) -> None:
        self._memory = PinnedRange(group, 2 * self.BYTES)
        self.ptr = self._memory.ptr
        ids = {peer: self._memory.peer_id(peer) for peer in range(group.world_size) if peer != group.rank}
        answers = group.exchange.all_gather(ids, _IDS, "ids of pinned memory of schedules")
        self._at_peers = {peer: answers[peer][group.rank] for peer in ids}

    @staticmethod
    def offset(side: str) -> int:
        """Where the box for a side begins. One side of a schedule receives, so all that receive share one."""
        return _OFFSETS[side]

    def source_id(self, peer: int) -> int:
        """The memory id in this rank's proxy."""
        return self._memory.source_id(peer)

    def id_at(self, peer: int) -> int:
        """The memory id in a peer's proxy."""
        return self._at_peers[peer]

    def close(self) -> None:
        """Unmaps them. No schedule of any rank may still use them."""
        self._memory.close()
