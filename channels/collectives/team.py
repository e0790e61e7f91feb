"""A team: the scratch memory and links through which the shipped collectives work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxyccl.channels.collectives import packet_team
from proxyccl.channels.collectives.packet_team import PacketTeam
from proxyccl.channels.proxy_channel import connect_handles
from proxyccl.channels.sm_channel import SmSemaphores
from proxyccl.device._native import ffi, lib
from proxyccl.device.errors import ResourceError

if TYPE_CHECKING:
    from proxyccl.channels.communicator import Communicator
    from proxyccl.channels.proxy_channel import ProxyChannel

_SHORTEST_PIECE = 16 * 1024
"""Bytes below which a piece is not worth its signal: two 16-byte accesses of each thread of a large block."""
_SHORTEST_PROXIED_PIECE = 512 * 1024
"""The same where the proxy sends it: what a copy engine moves while the next two calls into the driver are made."""


class Team:
    """All ranks make it together: one team of all of them, or several side by side, one for each rank.

    Raises ResourceError for more members than a block of the shipped kernels has threads.

    Args:
        communicator: whose ranks.
        proxied: reach every peer through the proxy, even those that are mapped.
        members: the ranks of this rank's team, itself included; None for all. What the kernels call a rank is a
            number in this list.

    Attributes:
        blocks: the most blocks of a kernel of this team.
        packets: what the packet algorithms use; None where a peer is not mapped, or there are too many.
    """

    def __init__(self, communicator: Communicator, *, proxied: bool, members: list[int] | None = None) -> None:
        runtime, rank = communicator.runtime, communicator.rank
        members = list(range(communicator.world_size)) if members is None else members
        ranks = len(members)
        if ranks > lib.PROXYCCL_MAX_BLOCK_THREADS:
            raise ResourceError(f"collectives serve at most {lib.PROXYCCL_MAX_BLOCK_THREADS} ranks, not {ranks}")
        accessible = communicator.topology.accessible
        via_proxy = [peer for peer in members if peer != rank and (proxied or not accessible[peer])]
        mapped = [peer for peer in members if peer != rank and peer not in via_proxy]
        # All ranks of the team use one grid, and lanes of one kind (team.h).
        flags = communicator.all_gather_bytes(b"0" if via_proxy else b"1", "the first collective")
        everyone_mapped = all(flags[peer] == b"1" for peer in members)
        defaults = runtime.launch_defaults
        self.blocks = defaults.blocks if everyone_mapped else defaults.copy_blocks
        self._bytes_per_block = defaults.bytes_per_block
        self.threads = max(defaults.threads, -(-ranks // 32) * 32)
        lanes = self.blocks if everyone_mapped else 1

        buffers = lib.PROXYCCL_EXCHANGE_BUFFERS * defaults.exchange_bytes
        self._scratch = communicator.empty((buffers if everyone_mapped else 2 * buffers,), "uint8")
        memory = communicator.register(self._scratch)
        self._semaphores = SmSemaphores(communicator, lanes)
        self.proxy_channels: dict[int, list[ProxyChannel]] = {}
        self._kept: list[object] = [memory]
        if b"0" in flags:
            self.proxy_channels, kept = connect_handles(communicator, memory, memory, via_proxy, lanes)
            self._kept.append(kept)

        links = ffi.new("ProxycclLink []", lanes * ranks)
        for lane in range(lanes):
            for number, peer in enumerate(members):
                link = links[lane * ranks + number]
                link.peer = peer
                if peer in mapped:
                    self._semaphores.fill(link.semaphore, peer, lane)
                    link.remote = ffi.cast("char *", memory.peer_ptr(peer))
                elif peer in via_proxy:
                    link.proxied = 1
                    ffi.memmove(
                        ffi.addressof(link, "proxy"),
                        self.proxy_channels[peer][lane].device_handle,
                        ffi.sizeof("ProxycclProxyChannel"),
                    )

        team_bytes = -(-ffi.sizeof("ProxycclTeam") // 128) * 128
        self._memory = runtime.allocate(team_bytes + ffi.sizeof(links))
        team = ffi.new("ProxycclTeam *")
        team.rank, team.world_size, team.divisor = members.index(rank), ranks, communicator.world_size
        team.control = ffi.cast("ProxycclControl *", communicator.control.device_pointer)
        team.links = ffi.cast("ProxycclLink *", self._memory.ptr + team_bytes)
        team.scratch = ffi.cast("char *", self._scratch.ptr)
        team.exchange_bytes, team.staging_offset, team.lanes = defaults.exchange_bytes, buffers, lanes
        team.shortest_piece = _SHORTEST_PIECE if everyone_mapped else _SHORTEST_PROXIED_PIECE
        for offset, data in ((0, team), (team_bytes, links)):
            raw = bytes(ffi.buffer(data))
            runtime.copy(self._memory.ptr + offset, int(ffi.cast("uintptr_t", ffi.from_buffer(raw))), len(raw))
        with_packets = everyone_mapped and ranks == communicator.world_size <= packet_team.MAX_RANKS
        self.packets = PacketTeam(communicator) if with_packets else None

    def grid(self, nbytes: int) -> int:
        """Blocks for a collective of `nbytes` bytes a rank: few for a short one, which is soonest done."""
        return max(1, min(self.blocks, -(-nbytes // self._bytes_per_block)))

    def close(self) -> None:
        """Frees the memory. No kernel of any rank may use it any more."""
        self._scratch.free()
        self._memory.close()
        self._semaphores.close()
        if self.packets is not None:
            self.packets.close()

    @property
    def device_pointer(self) -> int:
        """Address of the ProxycclTeam."""
        return self._memory.ptr
