"""A team: the scratch memory and links that the shipped collectives use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from proxyccl.channels.collectives import packet_team
from proxyccl.channels.collectives.packet_team import PacketTeam
from proxyccl.channels.collectives.request import CtaPolicy
from proxyccl.channels.collectives.selection import sends_through_pinned_memory
from proxyccl.channels.group import Group
from proxyccl.channels.joining.exchange import FLAG
from proxyccl.channels.memory import RegisteredMemory, allocate, register
from proxyccl.channels.pinned_memory import PinnedRange
from proxyccl.channels.proxy_channel import ProxyChannel, connect_handles
from proxyccl.channels.sm_channel import SmSemaphores
from proxyccl.device._native import ffi, lib
from proxyccl.device.arguments.integers import round_up
from proxyccl.device.errors import ResourceError
from proxyccl.device.runtime import Memory
from proxyccl.device.sleepers import ProxiedStruct

if TYPE_CHECKING:
    from proxyccl.device._native import ProxycclTeamPointer  # this name exists only in the stub, not in cffi

_SHORTEST_PROXIED_PIECE = 512 * 1024
"""Least bytes of a piece that the proxy sends: shorter pieces are not worth a signal, because a copy engine moves this
much during the next two driver calls.
"""
_ONE_CROSSING_BYTES = 32 * 1024
"""An all_reduce by proxy of at most this many bytes crosses the links once instead of twice. Between only two ranks
whose memory is not mapped, the data always crosses once, because two crossings would send as many bytes.
"""
_NO_LIMIT = (1 << 64) - 1
_REACHED_AT: int = ffi.offsetof("ProxycclTeam", "reached_at")
_PINNED_BYTES_PER_BLOCK = 64 * 1024
"""A kernel that sends through pinned memory takes one more block for each multiple of this size: more blocks would read
faster, but cost synchronization.
"""
_PROXIED_PARTS = 4
"""The least number of pieces into which data for the proxy is cut."""


class Links:
    """A table of ProxycclLink (team.h), indexed by lane and member. All ranks construct a `Links` together.

    Args:
        memory: the scratch memory that peers write to.
        proxied: the scratch memory that proxies of peers write to.
        members: the ranks of the table's columns.
        via_proxy: members reached through the proxy; the memory of all other members is mapped.
        lanes: number of links to each peer.
        proxied_anywhere: whether any rank of the group reaches a peer through the proxy.

    Attributes:
        table: the links.
        proxy_channels: maps each peer reached through the proxy to the channels of its lanes.
        sleepers: wakes the channels' proxy if the proxy sleeps; None if there are no channels.
    """

    def __init__(
        self,
        group: Group,
        memory: RegisteredMemory,
        proxied: RegisteredMemory | PinnedRange,
        members: Sequence[int],
        via_proxy: list[int],
        lanes: int,
        *,
        proxied_anywhere: bool,
    ) -> None:
        self._semaphores = SmSemaphores(group, lanes, members)
        self.proxy_channels: dict[int, list[ProxyChannel]] = {}
        self._kept: object = None
        if proxied_anywhere:
            self.proxy_channels, self._kept = connect_handles(group, proxied, proxied, via_proxy, lanes)
        self.sleepers = group.links.proxy.sleepers if self.proxy_channels else None
        self.table = ffi.new("ProxycclLink[]", lanes * len(members))
        for lane in range(lanes):
            for number, peer in enumerate(members):
                link = self.table[lane * len(members) + number]
                link.peer = peer
                if peer in via_proxy:
                    link.proxied = 1
                    handle = self.proxy_channels[peer][lane].device_handle
                    ffi.memmove(ffi.addressof(link, "proxy"), handle, ffi.sizeof("ProxycclProxyChannel"))
                elif peer != group.rank:
                    self._semaphores.fill(link.semaphore, peer, lane)
                    link.remote = ffi.cast("char *", memory.peer_ptr(peer))

    def on_device(self, group: Group, before: int) -> Memory:
        """Returns device memory that holds `before` bytes and then the table."""
        raw = bytes(ffi.buffer(self.table))
        memory = group.device_memory.allocate(before + len(raw), "channels")
        group.runtime.copy(memory.ptr + before, int(ffi.cast("uintptr_t", ffi.from_buffer(raw))), len(raw))
        return memory

    def close(self) -> None:
        """Frees this rank's semaphores. All kernels of this rank must have completed."""
        self._semaphores.close()


class Team:
    """The scratch memory and links of a team. All ranks construct a `Team` together: one team of all ranks, or disjoint
    teams of which each rank joins one.

    Raises ResourceError if the team has more members than a block of the shipped kernels has threads.

    Args:
        members: the ranks of this rank's team, including this rank; None for all. In kernels, a rank is identified by
            its index in this list.
        whole_lines: whether all ranks' links carry lines of 128 bytes in one piece (lines.h).

    Attributes:
        pinned: whether data for proxies lies in pinned memory, which the proxies' CPUs copy.
        all_mapped: whether every member maps the memory of all members; then each block has its own lane.
        blocks: the most blocks of a kernel of this team.
        packets: the state of the packet algorithms; None if the team lacks a rank of the group, if a peer is not
            mapped, or if there are more than `packet_team.MAX_RANKS` ranks.
    """

    def __init__(self, group: Group, *, members: list[int] | None = None, whole_lines: bool = False) -> None:
        runtime, rank = group.runtime, group.rank
        members = list(range(group.world_size)) if members is None else members
        ranks = len(members)
        if ranks > lib.PROXYCCL_MAX_BLOCK_THREADS:
            raise ResourceError(f"collectives serve at most {lib.PROXYCCL_MAX_BLOCK_THREADS} ranks, not {ranks}")
        accessible = group.topology.accessible
        via_proxy = [peer for peer in members if peer != rank and not accessible[peer]]
        # Each rank tells the others whether it maps all peers, because all ranks of a team must use the same grid and
        # the same kind of lanes (team.h).
        flags = group.exchange.all_gather(not via_proxy, FLAG, "the first collective")
        self.all_mapped = self.all_mapped_of(ranks, [flags[peer] for peer in members])
        defaults = runtime.launch_defaults
        self.blocks = defaults.blocks if self.all_mapped else defaults.copy_blocks
        self._efficient_blocks = min(self.blocks, defaults.efficient_blocks)
        # All ranks must agree on whether to use pinned memory, because they allocate it together.
        self.pinned = not all(flags) and sends_through_pinned_memory(group)
        self._bytes_per_block = _PINNED_BYTES_PER_BLOCK if self.pinned else defaults.bytes_per_block
        self._meeting_bytes, self._offered_bytes = defaults.meeting_bytes, defaults.offered_bytes
        self.threads = max(defaults.threads, ranks)
        lanes = self.blocks if self.all_mapped else 1

        data_bytes, result_bytes = (
            (defaults.pinned_buffer_bytes,) * 2 if self.pinned else (defaults.data_bytes, defaults.result_bytes)
        )
        buffers = lib.PROXYCCL_PIPELINE_DEPTH * (data_bytes + result_bytes)
        outputs = round_up(2 * lanes * ranks * packet_team.PACKET_BYTES, 128)
        self._writes_outputs = self.all_mapped and members == list(range(group.world_size))
        both_ways = 2 * buffers + outputs
        nbytes = buffers + outputs if self.all_mapped or self.pinned else both_ways
        with_packets = self.all_mapped and 1 < ranks == group.world_size <= packet_team.MAX_RANKS
        self.packets = PacketTeam(group, whole_lines=whole_lines) if with_packets else None
        packets_offset = nbytes
        nbytes += 0 if self.packets is None else self.packets.nbytes
        self._scratch = allocate(group, (nbytes,), "uint8", "scratch")
        memory = register(group, self._scratch)
        self._pinned = PinnedRange(group, both_ways) if self.pinned else None
        self._kept = memory
        proxied, by_any = self._pinned or memory, not all(flags)
        self._links = Links(group, memory, proxied, members, via_proxy, lanes, proxied_anywhere=by_any)
        self.proxy_channels = self._links.proxy_channels
        epochs_offset = ffi.sizeof("ProxycclTeamCounters")
        counters_bytes = round_up(epochs_offset + lanes * ffi.sizeof("uint32_t"), 128)
        self._memory = self._links.on_device(group, counters_bytes)
        team = self._team = ffi.new("ProxycclTeam *")
        team.rank, team.world_size, team.divisor = members.index(rank), ranks, ranks
        team.control = ffi.cast("ProxycclControl *", group.control.device_pointer)
        team.counters = ffi.cast("ProxycclTeamCounters *", self._memory.ptr)
        team.epochs = ffi.cast("uint32_t *", self._memory.ptr + epochs_offset)
        team.links = ffi.cast("ProxycclLink *", self._memory.ptr + counters_bytes)
        team.scratch = ffi.cast("char *", self._scratch.ptr)
        team.proxied = ffi.cast("char *", proxied.ptr)
        team.data_bytes, team.result_bytes = data_bytes, result_bytes
        most = min(_ONE_CROSSING_BYTES, data_bytes // ranks // 128 * 128)
        if self.pinned:  # `pinned_kernel_bytes` limits the bytes for all peers together
            most = min(most, defaults.pinned_kernel_bytes // max(1, ranks - 1))
        team.one_crossing_bytes = most if self.all_mapped or ranks > 2 else _NO_LIMIT
        team.outputs_offset, team.staging_offset, team.lanes = buffers, buffers + outputs, lanes
        for number in range(min(ranks, lib.PROXYCCL_MAX_MAPPED_RANKS)):
            team.remote[number] = self._links.table[number].remote
        if self.packets is not None:
            self.packets.place([memory.peer_ptr(peer) + packets_offset for peer in members])

    @staticmethod
    def all_mapped_of(ranks: int, reaching: Iterable[bool]) -> bool:
        """Returns `all_mapped` for a team of `ranks` members; `reaching` says for each member whether that member's
        kernels reach all members.
        """
        return ranks <= lib.PROXYCCL_MAX_MAPPED_RANKS and all(reaching)

    def grid(self, nbytes: int, policy: CtaPolicy) -> int:
        """Returns the number of blocks of a kernel for a collective of `nbytes` bytes per rank. Short collectives are
        fastest with few blocks.
        """
        most = self._efficient_blocks if policy == "efficiency" else self.blocks
        return max(1, min(most, -(-nbytes // self._bytes_per_block)))

    def parameter(self, *, nbytes: int = 0, reached: bool = False, divisor: int | None = None) -> bytes:
        """Returns the ProxycclTeam that a kernel takes.

        Args:
            divisor: the divisor of an average; None for the number of the team's ranks.
            nbytes: size of a share in bytes. If the size is at least `meeting_bytes`, ranks exchange output addresses
                before they send.
            reached: whether the kernels of all ranks reach this rank's output, so that the prepared call holds the
                addresses at which peers reach the output.
        """
        return self._struct(self._call(nbytes, divisor), reached=reached)

    def pipeline(
        self,
        count: int,
        itemsize: int,
        policy: CtaPolicy,
        *,
        reached: bool = False,
        loadable: bool = False,
        divisor: int | None = None,
    ) -> tuple[int, bytes]:
        """Returns the number of blocks of a two-shot kernel for `count` elements per rank, and the ProxycclTeam that
        the kernel takes.

        Args:
            loadable: whether input and output are the same memory, at a multiple of 16 bytes.
            reached, divisor: as for `parameter`.
        """
        team = self._call(0, divisor)
        team.offers = self._writes_outputs and reached and loadable and count * itemsize <= self._offered_bytes
        aligned = 16 // itemsize  # shares and pieces are aligned to 16 bytes if the array is aligned
        most = share = round_up(-(-count // team.world_size), aligned)
        if not self.all_mapped:  # even a message that fits in one piece is cut, so that its transfers overlap
            most = max(round_up(-(-share // _PROXIED_PARTS), aligned), _SHORTEST_PROXIED_PIECE // itemsize)
        self._cut(team, share, itemsize, most, team.result_bytes)
        return self.grid(count * itemsize, policy), self._struct(team, reached=reached)

    def scatter(self, count: int, itemsize: int, policy: CtaPolicy) -> tuple[int, bytes]:
        """Returns the number of blocks of a reduce_scatter kernel for `count` elements of each rank, and the
        ProxycclTeam that the kernel takes. If the data needs several rounds, it is cut into pieces.
        """
        nbytes = count * itemsize
        team = self._call(0)
        if self.all_mapped and nbytes % 16 == 0 and nbytes * (team.world_size - 1) > team.data_bytes:
            self._cut(team, count, itemsize, count, team.data_bytes)
        return self.grid(nbytes * team.world_size, policy), self._struct(team)

    @staticmethod
    def _cut(team: ProxycclTeamPointer, share: int, itemsize: int, most: int, buffer_bytes: int) -> None:
        """Sets the number and the size of the pieces into which a rank's share is cut; each is at most as long as a
        slot of a buffer of `buffer_bytes`.
        """
        team.share, team.slot_bytes = share, buffer_bytes // (team.world_size - 1) // 128 * 128
        team.piece = min(team.slot_bytes // itemsize, share, most)
        team.pieces = -(-share // team.piece)

    def _struct(self, team: ProxycclTeamPointer, *, reached: bool = False) -> bytes:
        peers_words = _REACHED_AT if reached and self._writes_outputs else None
        return ProxiedStruct.of(bytes(ffi.buffer(team)), self._links.sleepers, peers_words=peers_words)

    def takes_one_crossing(self, nbytes: int) -> bool:
        """Returns whether the kernel `all_reduce_by_proxy` exchanges data only once for this many bytes."""
        return nbytes <= self._team.one_crossing_bytes

    def _call(self, nbytes: int, divisor: int | None = None) -> ProxycclTeamPointer:
        team = ffi.new("ProxycclTeam *", self._team[0])
        team.divisor = divisor or team.world_size
        team.meet = self._writes_outputs and nbytes >= self._meeting_bytes
        return team

    def close(self) -> None:
        """Frees the memory. All kernels of all ranks must have completed."""
        self._scratch.free()
        self._memory.close()
        self._links.close()
        if self._pinned is not None:
            self._pinned.close()
        if self.packets is not None:
            self.packets.close()
