"""Pinned memory of each rank through which its schedules send and receive little: the proxies' CPUs copy it."""

from __future__ import annotations

from typing import ClassVar

from proxyccl.channels.group import Group
from proxyccl.device.runtime import PinnedMemory
from proxyccl.proxy.codec import Codec, Message, Uint64
from proxyccl.proxy.transports.table import TRANSPORTS


class _Offer(Message, frozen=True):
    """A rank's description of its boxes.

    Attributes:
        handle: maps them in ranks of the same host.
        exposed: by remote transport, the address and the key by which peers name them.
    """

    handle: bytes
    exposed: dict[str, tuple[Uint64, Uint64]]


_OFFER = Codec(_Offer, 64 << 10, "pinned memory offer")
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
        proxy = group.links.proxy
        self._memory = group.runtime.allocate_pinned(2 * self.BYTES)
        self.ptr = self._memory.ptr
        self._own = proxy.add_pinned_memory(self._memory)
        remote = group.links.remote
        self._exposed = {name: remote.expose_pinned(self._memory, name) for name in remote.transports}
        exposed = {name: (memory.address, memory.key) for name, memory in self._exposed.items()}
        offers = group.exchange.all_gather(_Offer(self._memory.handle, exposed), _OFFER, "pinned memory of schedules")
        self._remote, self._theirs = remote, list[PinnedMemory]()
        ids = {peer: self._add(group, peer, offer) for peer, offer in enumerate(offers) if peer != group.rank}
        answers = group.exchange.all_gather(ids, _IDS, "ids of pinned memory of schedules")
        self._at_peers = {peer: answers[peer][group.rank] for peer in ids}

    def _add(self, group: Group, peer: int, offer: _Offer) -> int:
        """Adds a peer's boxes to this rank's proxy. Returns their id."""
        transport = group.links.transport(peer)
        if TRANSPORTS[transport].is_remote:
            return group.links.proxy.add_remote_memory(
                offer.exposed[transport][0], 2 * self.BYTES, offer.exposed[transport][1]
            )
        with group.mapping_of(peer):
            self._theirs.append(group.runtime.open_pinned(offer.handle))
        return group.links.proxy.add_pinned_memory(self._theirs[-1])

    @staticmethod
    def reach_remote(group: Group) -> bool:
        """Whether there are remote pairs of ranks and the data of all of them is staged; the same on all ranks."""
        used = group.topology.all_transports
        remote = [functions for name in used if (functions := TRANSPORTS[name].remote) is not None]
        return bool(remote) and all(functions.expose_pinned is not None for functions in remote)

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
        """Unmaps them. No schedule of any rank may still use them."""
        for exposed in self._exposed.values():
            self._remote.withdraw(exposed)
        for memory in (self._memory, *self._theirs):
            memory.close()
