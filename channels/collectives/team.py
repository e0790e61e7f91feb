"""A team: the scratch memory and links through which the shipped collectives of one communicator work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxyccl.channels.collectives import packet_team
from proxyccl.channels.collectives.packet_team import PacketTeam
from proxyccl.channels.proxy_channel import connect_handles
from proxyccl.channels.sm_channel import SmSemaphores
from proxyccl.device._native import ffi

if TYPE_CHECKING:
    from proxyccl.channels.communicator import Communicator
    from proxyccl.channels.proxy_channel import ProxyChannel

EXCHANGE_BYTES = 4 * 1024 * 1024
"""What a rank takes in from all others in one round."""


class Team:
    """All ranks make it together.

    Args:
        communicator: whose ranks.
        proxied: reach every peer through the proxy, even those that are mapped.

    Attributes:
        blocks: the most blocks of a kernel of this team: each has links of its own.
        packets: what the packet algorithms use; None where a peer is not mapped, or there are too many.
    """

    def __init__(self, communicator: Communicator, *, proxied: bool) -> None:
        runtime, rank, ranks = communicator.runtime, communicator.rank, communicator.world_size
        accessible = communicator.topology.accessible
        via_proxy = [peer for peer in range(ranks) if peer != rank and (proxied or not accessible[peer])]
        mapped = [peer for peer in range(ranks) if peer != rank and peer not in via_proxy]
        # All ranks of the team use one grid; a proxied link costs a channel id a block, and copy engines like large
        # pieces.
        flags = communicator.all_gather_bytes(b"0" if via_proxy else b"1", "the first collective")
        everyone_mapped = all(flag == b"1" for flag in flags)
        self.blocks = runtime.launch_defaults.blocks if everyone_mapped else runtime.launch_defaults.copy_blocks
        self._bytes_per_block = runtime.launch_defaults.bytes_per_block
        self.threads = max(runtime.launch_defaults.threads, -(-ranks // 32) * 32)

        staging_offset = 2 * EXCHANGE_BYTES
        scratch_bytes = staging_offset + (0 if everyone_mapped else 2 * EXCHANGE_BYTES)
        self._scratch = communicator.empty((scratch_bytes,), "uint8")
        memory = communicator.register(self._scratch)
        self._semaphores = SmSemaphores(communicator, self.blocks)
        self.proxy_channels: dict[int, list[ProxyChannel]] = {}
        self._kept: list[object] = [memory]
        if not everyone_mapped:
            self.proxy_channels, kept = connect_handles(communicator, memory, memory, via_proxy, self.blocks)
            self._kept.append(kept)

        links = ffi.new("ProxycclLink []", self.blocks * ranks)
        for block in range(self.blocks):
            for peer in range(ranks):
                link = links[block * ranks + peer]
                link.peer = peer
                if peer in mapped:
                    self._semaphores.fill(link.semaphore, peer, block)
                    link.remote = ffi.cast("char *", memory.peer_ptr(peer))
                elif peer in via_proxy:
                    link.proxied = 1
                    ffi.memmove(
                        ffi.addressof(link, "proxy"),
                        self.proxy_channels[peer][block].device_handle,
                        ffi.sizeof("ProxycclProxyChannel"),
                    )

        team_bytes = -(-ffi.sizeof("ProxycclTeam") // 128) * 128
        self._memory = runtime.allocate(team_bytes + ffi.sizeof(links))
        team = ffi.new("ProxycclTeam *")
        team.rank, team.world_size = rank, ranks
        team.control = ffi.cast("ProxycclControl *", communicator.control.device_pointer)
        team.links = ffi.cast("ProxycclLink *", self._memory.ptr + team_bytes)
        team.scratch = ffi.cast("char *", self._scratch.ptr)
        team.exchange_bytes, team.staging_offset = EXCHANGE_BYTES, staging_offset
        for offset, data in ((0, team), (team_bytes, links)):
            raw = bytes(ffi.buffer(data))
            runtime.copy(self._memory.ptr + offset, int(ffi.cast("uintptr_t", ffi.from_buffer(raw))), len(raw))
        self.packets = PacketTeam(communicator) if everyone_mapped and ranks <= packet_team.MAX_RANKS else None

    def grid(self, nbytes: int) -> int:
        """Blocks for a collective of `nbytes` bytes a rank: few for a short one, which is soonest done."""
        return max(1, min(self.blocks, -(-nbytes // self._bytes_per_block)))

    @property
    def device_pointer(self) -> int:
        """Address of the ProxycclTeam."""
        return self._memory.ptr
