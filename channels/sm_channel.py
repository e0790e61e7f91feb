"""`SmChannel`: kernels access a peer's mapped memory by their own loads and stores."""

from __future__ import annotations

from collections.abc import Sequence

from proxyccl.channels.group import Group
from proxyccl.channels.handles import Channel, ChannelSet
from proxyccl.channels.memory import RegisteredMemory
from proxyccl.device._native import ffi, lib

_LINE = 128  # one cache line per word, so that accesses for different peers don't share lines


class SmChannel(Channel):
    """A channel to one peer; its device side is proxyccl::SmChannelDeviceHandle."""

    handle_kind = lib.PROXYCCL_HANDLE_SM_CHANNEL
    semaphore_kind = lib.PROXYCCL_HANDLE_SM_SEMAPHORE


class SmSemaphores:
    """`DeviceSemaphores`: `count` semaphores between this rank and each mapped peer, including this rank itself.

    All ranks construct an `SmSemaphores` together. One exchange is enough for any number of semaphores, because this
    rank's offer lets each peer compute the addresses of all the words that the peer signals.

    Args:
        group: the ranks.
        count: the number of semaphores to each peer.
        members: the ranks that may be peers, this rank included; the same on all members. With None, all ranks may be
            peers.
    """

    def __init__(self, group: Group, count: int, members: Sequence[int] | None = None) -> None:
        self._members = list(range(group.world_size)) if members is None else list(members)
        self._places = {peer: place for place, peer in enumerate(self._members)}
        self._ranks, self._count = len(self._members), count
        self._nbytes = self._ranks * count * _LINE
        self._local = group.device_memory.allocate(2 * self._nbytes, "channels")
        self._rank = group.rank
        words = group.semaphore_words
        self._inbound, offers = words.make(self._nbytes, self)
        self._remote = {self._rank: self._inbound}
        for peer in self._members:
            if peer != self._rank and group.topology.accessible[peer]:
                with group.mapping_of(peer):
                    self._remote[peer] = words.at_peer(offers[peer])
        group.inventory.add_semaphores(self)

    def fill(self, semaphore: object, peer: int, index: int = 0) -> None:
        """Fills in a ProxycclSemaphore: semaphore `index` to `peer`."""
        mine = (index * self._ranks + self._places[peer]) * _LINE
        theirs = (index * self._ranks + self._places[self._rank]) * _LINE

        def word(address: int) -> object:
            return ffi.cast("uint64_t *", address)

        semaphore.inbound = word(self._inbound + mine)  # type: ignore[attr-defined]
        semaphore.expected = word(self._local.ptr + mine)  # type: ignore[attr-defined]
        semaphore.outbound = word(self._local.ptr + self._nbytes + mine)  # type: ignore[attr-defined]
        semaphore.remote_inbound = word(self._remote[peer] + theirs)  # type: ignore[attr-defined]

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return [(self._inbound, self._nbytes), (self._local.ptr, self._local.nbytes)]

    def decode(self, words: bytes) -> list[tuple[int, int, int, int, int]]:
        lines = self._ranks * self._count
        values = [int.from_bytes(words[i * _LINE : i * _LINE + 8], "little") for i in range(3 * lines)]
        return [
            (self._members[i % self._ranks], i // self._ranks, *values[i::lines])  # type: ignore[misc]
            for i in range(lines)
        ]

    def close(self) -> None:
        """Frees this rank's own words, which this rank's kernels must have stopped using."""
        self._local.close()


def connect(
    group: Group,
    dst: RegisteredMemory,
    src: RegisteredMemory,
    packet_buffer: RegisteredMemory,
    peers: list[int],
) -> ChannelSet[SmChannel]:
    """Connects channels to `peers`; all ranks call this together. See `Communicator.sm_channels`."""
    group.topology.require_accessible(peers, "peers")
    pointers = {peer: dst.peer_ptr(peer) for peer in peers}  # refuses inaccessible peers before the exchange
    with group.exchange.telling():
        semaphores = SmSemaphores(group, 1)
    channels = []
    for number, peer in enumerate(peers):
        handle = ffi.new("ProxycclSmChannel *")
        semaphores.fill(handle.semaphore, peer)
        handle.semaphore.adds = group.runtime.adds_at_peer(group.topology.ranks[peer].device_id)
        handle.dst = ffi.cast("char *", pointers[peer])
        handle.src = ffi.cast("char *", src.ptr)
        handle.packet_buffer = ffi.cast("char *", packet_buffer.ptr)
        handle.control = ffi.cast("ProxycclControl *", group.control.device_pointer)
        handle.dst_bytes, handle.src_bytes = dst.peer_nbytes(peer), src.nbytes
        handle.packet_buffer_bytes = packet_buffer.nbytes
        handle.peer, handle.channel = peer, number
        channels.append(SmChannel(peer, handle))
    return ChannelSet(group.runtime, group.device_memory, SmChannel, channels, (semaphores, dst, src, packet_buffer))


MemoryChannel = SmChannel
"""MSCCL++'s name of `SmChannel` since 2025."""
