"""Pinned memory for short messages, which a CPU copies in less time than a copy engine needs to start."""

from __future__ import annotations

from proxyccl.channels.group import Group
from proxyccl.device.runtime import PinnedMemory
from proxyccl.proxy.codec import Codec, Uint64
from proxyccl.proxy.interface import Keys
from proxyccl.proxy.transports.table import TRANSPORTS

_Offer = tuple[bytes, dict[str, tuple[Uint64, Keys]]]
"""A rank's memory: the handle by which ranks of the same host map the memory, and for each remote transport the address
and the keys by which peers access the memory.
"""
_OFFER = Codec[_Offer](_Offer, 64 << 10, name="pinned memory offer")


class PinnedRange:
    """Pinned memory of one size on every rank. All ranks construct a `PinnedRange` together.

    Attributes:
        ptr: the device address of this rank's memory.
        private: False, because other processes can always map this memory.
    """

    private = False

    def __init__(self, group: Group, nbytes: int) -> None:
        self._group, self._remote = group, group.links.remote
        self._memory = group.runtime.allocate_pinned(nbytes)
        self.ptr, self.nbytes = self._memory.ptr, nbytes
        transports = self._remote.transports
        self._exposed = {name: self._remote.context.expose_pinned(self._memory, name) for name in transports}
        exposed = {name: (memory.address, memory.keys) for name, memory in self._exposed.items()}
        self._offers = group.exchange.all_gather((self._memory.handle, exposed), _OFFER, "pinned memory")
        self._opened: list[PinnedMemory] = []
        self._own_id: int | None = None
        self._ids: dict[int, int] = {}

    def source_id(self, peer: int) -> int:
        """Returns the id of this rank's memory in this rank's proxy, for triggers to any peer."""
        if self._own_id is None:
            self._own_id = self._group.links.proxy.add_pinned_memory(self._memory)
        return self._own_id

    def peer_id(self, peer: int) -> int:
        """Returns the id of a peer's memory in this rank's proxy.

        Raises:
            ResourceError: no ids are left.
        """
        if peer not in self._ids:
            self._ids[peer] = self._add(peer)
        return self._ids[peer]

    def _add(self, peer: int) -> int:
        group, (handle, exposed) = self._group, self._offers[peer]
        transport = group.links.transport(peer)
        if TRANSPORTS[transport].is_remote:
            address, keys = exposed[transport]
            return group.links.proxy.add_remote_memory(address, self.nbytes, keys)
        with group.mapping_of(peer):
            self._opened.append(group.runtime.open_pinned(handle))
        return group.links.proxy.add_pinned_memory(self._opened[-1])

    def close(self) -> None:
        """Unmaps the memory, which neither triggers nor schedules of any rank may still use."""
        for exposed in self._exposed.values():
            self._remote.withdraw(exposed)
        for memory in (self._memory, *self._opened):
            memory.close()
