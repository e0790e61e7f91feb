"""The scratch memory through which the packet algorithms work, and the shape of each call.

Every peer's is mapped, so the kernels need no links and no semaphores: a packet is its own signal. A kernel gets
everything that it must know as one parameter (packet_team.h).
"""

from __future__ import annotations

from proxyccl.channels.group import Group
from proxyccl.channels.memory import allocate, register
from proxyccl.device._native import ffi, lib
from proxyccl.device.arrays.dtypes import DType

MAX_RANKS: int = lib.PROXYCCL_MAX_PACKET_RANKS
"""The most ranks whose addresses the kernels' parameter has room for."""
SLOT_PACKETS = 2048
"""Packets that a block may take from a rank in one epoch: 16 KiB of data. Fewer if SCRATCH_BYTES are not enough."""
SCRATCH_BYTES = 32 * 1024 * 1024

PACKET_BYTES = 16
_PAYLOAD_BYTES = 8
_WARP = 64  # lanes of a warp, on the target with the widest one


class PacketTeam:
    """All ranks make it together; each must have mapped every other.

    Attributes:
        blocks: the most blocks of a packet kernel.
        move_bytes: the longest share that an all_gather or an all_to_all moves in packets.
        epochs: the blocks' counters of epochs, uint32 each, in device memory.
    """

    def __init__(self, group: Group) -> None:
        runtime, ranks = group.runtime, group.world_size
        defaults = runtime.launch_defaults
        self.blocks = defaults.pair_packet_blocks if ranks == 2 else defaults.packet_blocks
        self._threads, self.move_bytes = defaults.packet_threads, defaults.packet_move_bytes // max(1, ranks - 1)
        self._max_threads = max(defaults.threads, defaults.packet_threads)
        self._ranks = ranks
        slots = 2 * self.blocks * lib.PROXYCCL_PACKET_SLOTS_PER_RANK * ranks
        self._slot_packets = min(SLOT_PACKETS, SCRATCH_BYTES // (slots * PACKET_BYTES))
        self._scratch = allocate(group, (slots * self._slot_packets * PACKET_BYTES,), "uint8")
        self._memory = register(group, self._scratch)
        self.epochs = runtime.allocate(self.blocks * ffi.sizeof("uint32_t"))

        team = self._team = ffi.new("ProxycclPacketTeam *")
        team.rank, team.world_size, team.slot_packets = group.rank, ranks, self._slot_packets
        team.control = ffi.cast("ProxycclControl *", group.control.device_pointer)
        team.epochs = ffi.cast("uint32_t *", self.epochs.ptr)
        team.scratch = ffi.cast("char *", self._scratch.ptr)
        for peer in range(ranks):
            if peer != group.rank:
                team.remote[peer] = ffi.cast("char *", self._memory.peer_ptr(peer))

    def launch(self, algorithm: str, dtype: DType, count: int) -> tuple[int, int, bytes]:
        """Blocks, threads and the kernels' first parameter for an all-reduce of `count` elements."""
        return self._shape(self._packets(algorithm, dtype, count))

    def move(self, share: int) -> tuple[int, int, bytes]:
        """The same for shares of this many bytes that are only moved."""
        return self._shape(-(-share // _PAYLOAD_BYTES))

    def _shape(self, packets: int) -> tuple[int, int, bytes]:
        blocks = max(1, min(self.blocks, -(-packets // self._threads)))
        share = -(-packets // blocks)
        epochs = -(-share // self._slot_packets)
        team = ffi.new("ProxycclPacketTeam *", self._team[0])
        team.packets, team.call_epochs, team.epoch_packets = packets, epochs, -(-share // epochs)
        threads = min(self._max_threads, -(-team.epoch_packets // _WARP) * _WARP)
        return blocks, threads, bytes(ffi.buffer(team))

    def close(self) -> None:
        """Frees the memory. Kernels of all ranks must have ended."""
        self._scratch.free()
        self.epochs.close()

    def _packets(self, algorithm: str, dtype: DType, count: int) -> int:
        """Packets that a rank exchanges with each peer, once or in each step."""
        if algorithm == "recursive_doubling":
            return -(-count * dtype.accumulator_itemsize // _PAYLOAD_BYTES)
        packets = -(-count * dtype.itemsize // _PAYLOAD_BYTES)
        return -(-packets // self._ranks) if algorithm == "two_shot_packets" else packets
