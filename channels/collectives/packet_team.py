"""The scratch memory of the packet algorithms, and the division of each call's data among blocks and packets.

Every peer's scratch memory is mapped, so the kernels need no links and no semaphores: the flag in a packet signals the
packet's arrival. A kernel's parameter ProxycclPacketTeam (packet_team.h) describes the scratch memory and how data is
divided among blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from proxyccl.channels.collectives.request import CtaPolicy
from proxyccl.channels.group import Group
from proxyccl.device._native import ffi, lib
from proxyccl.device.arguments.integers import round_up
from proxyccl.device.arrays.dtypes import DType
from proxyccl.device.base_runtime import LaunchDefaults

MAX_RANKS: int = lib.PROXYCCL_MAX_PACKET_RANKS
"""The most ranks whose addresses the kernels' parameter has room for."""
_SLOT_PACKETS, _SLOT_LINES = 2048, 1024
"""Most packets, and most packets of lines, that a block takes from a rank in one epoch. A block takes fewer packets if
memory of _MOST_BYTES bytes has no room for this many. If links carry lines, packets carry only messages of fewer than
`line_bytes` bytes, and a block takes at most one packet per thread and epoch.
"""
_MOST_BYTES = 24 * 1024 * 1024
"""Most bytes of the memory of packets, and of the memory of lines."""

PACKET_BYTES = 16
_PAYLOAD_BYTES = 8
_WARP = 64  # lanes of the widest warp of any target
LINE_WARP = 32  # lanes of a warp on the targets that have lines
_LINE_THREADS, _LINE_UNITS = 8, 15  # the values in lines.h
ALIGNMENT = 16
"""Bytes of a unit of lines, and of the widest access."""
_GROUP_BYTES = 4 * 4  # four floats in shared memory for each group of a row's packets
_MOST_SHARED_BYTES = 46 << 10  # dynamic shared memory that a block has on every target
LINE_PACKETS = 2  # the number of packets in which a thread keeps its part of two lines


def line_data_bytes(nbytes: int) -> int:
    """Returns the bytes of data in whole pairs of lines of `nbytes` bytes."""
    return nbytes // (_LINE_THREADS * LINE_PACKETS * PACKET_BYTES) * _LINE_UNITS * ALIGNMENT


def carries_whole_lines(group: Group) -> bool:
    """Returns whether this rank's runtime supports lines, and whether the links to all other ranks carry each line in
    one piece.

    Links that support atomic additions, such as NVLink, carry each line in one piece. Other links may deliver the parts
    of a line one by one.
    """
    runtime = group.runtime
    return runtime.launch_defaults.line_bytes > 0 and all(
        runtime.adds_at_peer(info.device_id) for info in group.topology.ranks
    )


class PacketLaunch(Struct, frozen=True):
    lines: bool  # whether the kernel's packets are lines
    blocks: int  # blocks of the grid
    threads: int  # threads of a block
    parameter: bytes  # the kernel's first parameter, a ProxycclPacketTeam


class RowShape(Struct, frozen=True):
    """How a row is divided among packets and blocks, for kernels whose blocks handle rows (rms_norm.h)."""

    lines: bool  # whether the packets are lines
    blocks: int  # blocks that share a row
    threads: int  # threads of a block
    share: int  # the size of a row in payloads of packets, or in units of lines
    row_packets: int  # the number of packets of a row
    packets: int  # the number of packets that a block handles in one epoch
    epochs: int  # the number of epochs that a block needs for its part of a row
    keeps: int  # which data the kernel's blocks keep in shared memory: 0 none, 1 sums, 2 sums and weights
    shared_bytes: int  # size of a block's dynamic shared memory

    @classmethod
    def of(
        cls, defaults: LaunchDefaults, row_bytes: int, scratch: PacketScratch | None, *, lines: bool, blocks: int = 1
    ) -> RowShape:
        """Returns how rows of `row_bytes` bytes are divided.

        Args:
            row_bytes: size of a row, not 0.
            scratch: the memory through which packets go; None for a kernel that sends no packets.
        """
        if lines:
            share, group, kept = -(-row_bytes // ALIGNMENT), LINE_WARP, 2 * ALIGNMENT
            row_packets, room = -(-share // _LINE_UNITS) * _LINE_THREADS, LINE_PACKETS
        else:
            share, group, kept = -(-row_bytes // _PAYLOAD_BYTES), _WARP, _PAYLOAD_BYTES
            row_packets, room = share, 1
        of_block = round_up(-(-row_packets // blocks), group)
        most = of_block if scratch is None else scratch.slot_packets // room // group * group
        epochs = -(-of_block // most)
        packets = round_up(-(-of_block // epochs), group)
        numbers = _GROUP_BYTES * max(-(-row_packets // LINE_WARP), (blocks - 1) * packets // LINE_WARP + 1)
        keeps = (
            min(2, (_MOST_SHARED_BYTES - numbers) // (epochs * packets * kept)) if numbers < _MOST_SHARED_BYTES else 0
        )
        threads = min(max(defaults.threads, defaults.packet_threads), round_up(packets, _WARP))
        shared_bytes = numbers + keeps * epochs * packets * kept
        return cls(lines, blocks, threads, share, row_packets, packets, epochs, keeps, shared_bytes)


class PacketTeam:
    """The state of packet algorithms between at least two ranks, each of which has mapped the memory of all ranks.

    Args:
        whole_lines: whether all ranks' links carry lines of 128 bytes in one piece, so that packets may be lines.

    Attributes:
        move_bytes: the longest share that an all_gather or an all_to_all moves in packets.
        scratch: the memory of packets; if links carry lines, a second item is the memory of lines.
        nbytes: bytes of one rank's scratch memory, whose addresses `place` sets.
    """

    def __init__(self, group: Group, *, whole_lines: bool) -> None:
        defaults, ranks = group.runtime.launch_defaults, group.world_size
        moved = defaults.line_move_bytes if whole_lines else defaults.packet_move_bytes
        self.move_bytes = moved // max(1, ranks - 1)
        self._threads = defaults.packet_threads
        self._max_threads, self._defaults = max(defaults.threads, defaults.packet_threads), defaults
        self._ranks = ranks
        blocks = defaults.pair_packet_blocks if ranks == 2 else defaults.packet_blocks
        self.scratch = [PacketScratch(group, blocks, defaults.packet_threads if whole_lines else _SLOT_PACKETS)]
        self._line_bytes, self._efficient_blocks = defaults.line_bytes, defaults.efficient_blocks
        if whole_lines:
            most = _MOST_BYTES // (_slots(1, ranks) * LINE_PACKETS * LINE_WARP * PACKET_BYTES)
            self.scratch.append(PacketScratch(group, min(defaults.line_blocks, most), _SLOT_LINES))
        self.nbytes = sum(scratch.nbytes for scratch in self.scratch)

    def place(self, addresses: Sequence[int]) -> None:
        """Sets the addresses, on this rank, of all ranks' scratch memory."""
        for each in self.scratch:
            each.place(addresses)
            addresses = [address + each.nbytes for address in addresses]

    def launch(self, algorithm: str, dtype: DType, count: int, policy: CtaPolicy) -> PacketLaunch:
        if algorithm == "recursive_doubling":
            return self._packets(count * dtype.accumulator_itemsize)
        share = -(-count // self._ranks) if algorithm == "two_shot_packets" else count
        return self.move(share * dtype.itemsize, policy)

    def move(self, share: int, policy: CtaPolicy) -> PacketLaunch:
        """Returns the launch of a call in which each rank sends `share` bytes to each other rank."""
        if len(self.scratch) == 1 or share < self._line_bytes:
            return self._packets(share)
        return self._lines(share, self._most_blocks(policy))

    def _most_blocks(self, policy: CtaPolicy) -> int:
        blocks = self.scratch[-1].blocks
        return min(blocks, self._efficient_blocks) if policy == "efficiency" else blocks

    def _packets(self, share: int) -> PacketLaunch:
        payloads = -(-share // _PAYLOAD_BYTES)
        scratch = self.scratch[0]
        blocks = max(1, min(scratch.blocks, -(-payloads // self._threads)))
        each = -(-payloads // blocks)
        epochs = -(-each // scratch.slot_packets)
        each = -(-each // epochs)
        threads = min(self._max_threads, round_up(each, _WARP))
        return PacketLaunch(False, blocks, threads, scratch.parameter(payloads, epochs, each))

    def _lines(self, share: int, most_blocks: int) -> PacketLaunch:
        units = -(-share // ALIGNMENT)
        packets = -(-units // _LINE_UNITS) * _LINE_THREADS
        scratch = self.scratch[1]
        share_of_block = round_up(-(-packets // most_blocks), LINE_WARP)
        epochs = -(-share_of_block // (scratch.slot_packets // LINE_PACKETS // LINE_WARP * LINE_WARP))
        each = round_up(-(-share_of_block // epochs), LINE_WARP)
        blocks = -(-packets // (epochs * each))
        threads = round_up(-(-each // -(-each // self._max_threads)), LINE_WARP)
        return PacketLaunch(True, blocks, threads, scratch.parameter(units, epochs, each))

    def row_shape(self, rows: int, row_bytes: int, policy: CtaPolicy) -> RowShape:
        """Returns how `rows` rows of `row_bytes` bytes are divided among this team's packets and blocks. If there are
        blocks for it, the blocks of a cluster share each row, so that each block has less to send and to compute.
        """
        lines = len(self.scratch) > 1
        blocks = self._defaults.row_blocks if lines else 1
        while blocks > 1 and rows * blocks > self._most_blocks(policy):
            blocks //= 2
        return RowShape.of(self._defaults, row_bytes, self.scratch[-1], lines=lines, blocks=blocks)

    def of_rows(self, shape: RowShape, rows: int, policy: CtaPolicy) -> tuple[int, bytes]:
        """Returns the number of blocks, and the first parameter, of a kernel in which each block handles one or more
        rows, or a part of a row.
        """
        scratch = self.scratch[-1]
        together = min(rows, self._most_blocks(policy) // shape.blocks)
        return together * shape.blocks, scratch.parameter(
            shape.share, shape.epochs * -(-rows // together), shape.packets
        )

    def close(self) -> None:
        """Frees the memory. All kernels of all ranks must have completed."""
        for scratch in self.scratch:
            scratch.close()


class PacketScratch:
    """Memory for packets on each rank, and the epoch counters of the kernels' blocks.

    Args:
        blocks: the most blocks of a kernel.
        most: the most packets of a slot; a slot has fewer packets if memory of _MOST_BYTES bytes has no room for this
            many.

    Attributes:
        slot_packets: packets of a slot.
        nbytes: bytes of the memory.
        epochs: the blocks' counters of epochs, uint32 each, in device memory.
    """

    def __init__(self, group: Group, blocks: int, most: int) -> None:
        ranks = group.world_size
        self.blocks = blocks
        slots = _slots(blocks, ranks)
        self.slot_packets = min(most, _MOST_BYTES // (slots * PACKET_BYTES) // _LINE_THREADS * _LINE_THREADS)
        self.nbytes = slots * self.slot_packets * PACKET_BYTES
        self.epochs = group.device_memory.allocate(blocks * ffi.sizeof("uint32_t"), "channels")

        team = self._team = ffi.new("ProxycclPacketTeam *")
        team.rank, team.world_size, team.slot_packets = group.rank, ranks, self.slot_packets
        team.control = ffi.cast("ProxycclControl *", group.control.device_pointer)
        team.epochs = ffi.cast("uint32_t *", self.epochs.ptr)

    def place(self, addresses: Sequence[int]) -> None:
        for rank, address in enumerate(addresses):
            self._team.memory[rank] = ffi.cast("char *", address)

    def parameter(self, share: int, epochs: int, epoch_packets: int) -> bytes:
        team = ffi.new("ProxycclPacketTeam *", self._team[0])
        team.share, team.call_epochs, team.epoch_packets = share, epochs, epoch_packets
        return bytes(ffi.buffer(team))

    def close(self) -> None:
        self.epochs.close()


def _slots(blocks: int, ranks: int) -> int:
    return 2 * blocks * lib.PROXYCCL_PACKET_SLOTS_PER_PEER * (ranks - 1)
