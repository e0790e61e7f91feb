"""Sizes and offsets of an expert-parallel workspace, computed from numbers alone (device/kernels/experts/experts.h)."""

from __future__ import annotations

from collections.abc import Callable

from proxyccl.channels.expert_parallel.config import EPConfig
from proxyccl.channels.expert_parallel.options import LayerOptions
from proxyccl.device._native import ffi, lib
from proxyccl.device.arguments.integers import round_up

ANNOUNCED_SLOTS: int = lib.PROXYCCL_ANNOUNCED_SLOTS
"""If all ranks together have at most this many slots, ranks announce their choices to every block, instead of sending
counts.
"""
DISPATCH_KERNELS: dict[str, str] = {
    "counts": "dispatch",
    "ids": "dispatch_ids",
    "masks": "dispatch_masks",
    "shared_masks": "dispatch_shared_masks",
}
"""The dispatch kernel for each kind of announcement."""
STORE_KERNEL = "dispatch_masks_store"
"""A smaller kernel for announcements by "masks", which makes whole dispatches of unquantized rows to output buffers."""
AS_BYTES = "uint8"
"""The element type of dispatch kernels that don't quantize rows."""
FEW_TOKENS = 32
"""The most tokens per block of a small dispatch. Larger dispatches send counts, and on one node some of their blocks
only send.
"""
MESSAGE_BYTES = 2 << 20
"""The least bytes of rows that are sent to another node as a separate message; a message of this size is long enough to
keep all network links busy.
"""
BATCH_TOKENS = 1024
"""The most tokens of a batch. A limit is needed because the block of each segment scans all earlier tokens of the
batch.
"""
_TOKENS_PER_BLOCK = 4
_TOKENS_PER_PACKET = 64  # each token is one bit of a mask's packet
_LINE = 128
_LEAST_COPY = 64 << 10  # bytes; a GPU executes shorter copies of another process only between time slices of kernels
_PIECES = 4  # the pieces of a row, kMaxPieces in expert_team.h; a combine sends a weight with each


def aligned(nbytes: int, to: int = _LINE) -> int:
    return round_up(nbytes, to)


def blocks_for(max_tokens: int, num_sm: int) -> int:
    """Returns the number of blocks of a kernel: no more blocks than have work, because each block waits for all other
    blocks.
    """
    return min(num_sm, -(-max_tokens // _TOKENS_PER_BLOCK))


class Areas:
    """Allocates consecutive aligned areas of a workspace."""

    def __init__(self) -> None:
        self.end = 0

    def take(self, nbytes: int) -> int:
        start = self.end
        self.end = aligned(start + nbytes)
        return start


class Geometry:
    """The geometry of a workspace, the same on all ranks. The geometry is computed without a device and without peers.

    Args:
        blocks, threads: the kernels' number of blocks, and of threads per block.
        nodes, local_size: the number of nodes as the kernels see them, and the number of ranks of each node.
        copied: whether GPU copies move the data between nodes.
        output_room: a function that returns the size of an output buffer for a number of bytes.

    Attributes:
        announces: the kind of a dispatch's announcement: "ids", "masks" or "shared_masks"; "counts" if counts are sent
            instead.
        experts: a ProxycclExperts with all sizes and offsets, but without pointers and the rank's own numbers.
        workspace_bytes: bytes of the memory that peers reach.
    """

    def __init__(
        self,
        options: LayerOptions,
        *,
        blocks: int,
        threads: int,
        nodes: int,
        local_size: int,
        copied: bool = False,
        output_room: Callable[[int], int] = aligned,
    ) -> None:
        config, ranks, scale_bytes = options.kernel_config, nodes * local_size, options.scale_bytes
        chosen_per_rank = options.config.num_experts_per_rank if options.by_rank else 0
        e = self.experts = ffi.new("ProxycclExperts *")
        e.world_size, e.local_size, e.nodes = ranks, local_size, nodes
        e.experts_per_rank, e.topk, e.max_tokens = config.num_experts_per_rank, config.topk, config.max_tokens
        e.local_combine, e.chosen_per_rank = options.enable_local_combine, chosen_per_rank
        e.padded_rows, e.expert_alignment = options.padded_rows, options.expert_alignment or 0
        if nodes == 1 and options.output_buffers:
            # One buffer more than the caller asks for: the last buffer serves `combine_input`, or rows that only pass
            # through a buffer.
            e.output_buffers, e.output_rows = options.output_buffers + 1, options.fixed_rows or options.most_tokens
        e.weight_bytes = ffi.sizeof("ProxycclExpertChoice") if chosen_per_rank else config.weight.itemsize
        e.blocks = blocks
        # With inboxes for two calls, the first half of a call with few tokens sends its rows without waiting for any
        # peer.
        e.kept_calls = 2 if options.padded_rows and nodes == 1 and not options.enable_local_combine else 1
        self._cut(config, blocks)
        self.announces = self._announce(config)
        # A float8 row also contains its scales. A row may also hold a token's weights, which `collect` returns.
        scaled_bytes = config.hidden + scale_bytes if scale_bytes else 0
        row_bytes = aligned(max(config.hidden * config.token.itemsize, scaled_bytes, config.topk * 8), 16)
        e.return_segment_bytes = e.segment_tokens * (row_bytes + 4 * _PIECES)
        return_bytes = blocks * e.return_segment_bytes
        e.least_message = _LEAST_COPY if copied else 0
        # A message that is lengthened to `least_message` must end before the next batch's rows. The factor 2 allows for
        # batches that differ in size by up to half.
        shortest = -(-2 * e.least_message // row_bytes)
        e.batch_tokens = max(1, shortest, min(MESSAGE_BYTES // row_bytes, BATCH_TOKENS))
        e.partial_bytes = return_bytes + e.least_message
        if nodes == 1 < local_size and blocks > 1 and e.segment_tokens > FEW_TOKENS and not e.output_buffers:
            self._cut(config, blocks - self._apart(config))
        e.senders = blocks - self._apart(config) if blocks > 1 else 0

        slots, routing = e.segment_tokens * config.topk, Areas()
        routing.take(ffi.sizeof("ProxycclExpertSegment"))
        e.counts_offset = routing.take(4 * (config.num_experts + ranks * chosen_per_rank))
        e.slots_offset = routing.take(ffi.sizeof("ProxycclExpertSlot") * slots)
        e.places_offset = routing.take(4 * e.segment_tokens)
        e.weights_offset = routing.take(e.weight_bytes * slots)
        e.routing_bytes = max(routing.end, aligned(-(-e.least_message // e.segments)))  # a routing is one message
        e.segment_bytes = e.segment_tokens * row_bytes
        e.slab_bytes = aligned(e.segments * (e.routing_bytes + e.segment_bytes) + e.least_message)

        groups = threads  # an upper bound, because only a kernel knows how many threads make a group
        areas, crossing = Areas(), 2 * nodes if nodes > 1 else 0
        e.routed = areas.take(8 * ranks * e.segments)
        e.sent = areas.take(8 * ranks * blocks * groups)
        e.read = areas.take(8 * local_size * e.segments)
        e.returned = areas.take(8 * local_size * blocks)
        e.summed = areas.take(8 * local_size * blocks)
        e.crossed = areas.take(8 * nodes * blocks if crossing else 0)
        e.announced = areas.take(2 * 16 * ranks * (1 + e.choice_packets + e.weight_packets) if e.choice_packets else 0)
        inboxes = 2 if self.announces in ("ids", "masks") else e.kept_calls
        e.inbox = areas.take(inboxes * local_size * e.slab_bytes)
        e.rail, e.outbox = areas.take(crossing * e.slab_bytes), areas.take(crossing * e.slab_bytes)
        places = min(local_size, config.topk) if chosen_per_rank else config.topk  # maximum number of rows of a token
        e.returns = areas.take(e.kept_calls * (local_size if options.enable_local_combine else places) * return_bytes)
        e.return_rails = areas.take(nodes * places * return_bytes if crossing else 0)
        e.partial_in, e.partial_out = areas.take(crossing * e.partial_bytes), areas.take(crossing * e.partial_bytes)
        e.loadable = areas.take(2 * 8 * local_size * blocks)
        e.output_scales = aligned(e.output_rows * config.hidden)  # scales follow the float8 rows
        scaled = e.output_scales + e.output_rows * scale_bytes if scale_bytes else 0
        e.output_bytes = output_room(max(e.output_rows * config.hidden * config.token.itemsize, scaled))
        e.outputs = areas.take(e.output_buffers * e.output_bytes)
        self.workspace_bytes = areas.end

    def _cut(self, config: EPConfig, segments: int) -> None:
        self.experts.segments, self.experts.segment_tokens = segments, -(-config.max_tokens // segments)

    def _apart(self, config: EPConfig) -> int:
        """Returns the number of a dispatch's blocks that only send rows; with output buffers, the number of blocks that
        only store rows that stay on this rank.

        A multiprocessor issues stores in order, so stores to the device's own memory would wait behind stores that a
        link delays. Therefore a block either sends or receives. The numbers of the two kinds of blocks are in
        proportion to the bytes that each kind loads and stores per token if experts are chosen evenly. A byte stored in
        a peer's memory has a weight of 4/3, which was measured on 4 H200.
        """
        ranks, blocks = int(self.experts.local_size), int(self.experts.blocks)
        arriving = ranks * (1 - (1 - 1 / ranks) ** config.topk)  # expected number of ranks that a token goes to
        crossing, by_rank = arriving * (1 - 1 / ranks) * 4 / 3, self.experts.chosen_per_rank != 0
        sending, receiving = 1 + crossing, arriving + (arriving if by_rank else config.topk)
        apart, others = (2 * arriving / ranks, sending) if self.experts.output_buffers else (sending, receiving)
        return max(1, round(blocks * apart / (apart + others)))

    def _announce(self, config: EPConfig) -> str:
        e, ranks = self.experts, config.world_size
        ids = -(-config.max_tokens * config.topk // lib.PROXYCCL_IDS_PER_PACKET)
        own = e.segment_tokens * config.topk
        few = (
            e.nodes == 1
            and config.num_experts <= lib.PROXYCCL_ANNOUNCED_EXPERTS
            and ranks * ids * lib.PROXYCCL_IDS_PER_PACKET <= ANNOUNCED_SLOTS
            and ranks * own <= lib.PROXYCCL_ANNOUNCED_OWN_SLOTS
            and own <= lib.PROXYCCL_ANNOUNCED_SEGMENT_SLOTS
            and e.segment_tokens <= FEW_TOKENS
        )
        masks = ranks * -(-config.max_tokens // _TOKENS_PER_PACKET)
        announces = "counts"
        if not e.chosen_per_rank:
            if few and ranks * (1 + ids) <= lib.PROXYCCL_ANNOUNCED_PAYLOADS:
                announces, e.choice_packets = "ids", ids
        elif self._masks_fit(config):
            if few:
                announces, e.choice_packets = "masks", 1 + masks
            elif e.output_buffers:
                announces, e.choice_packets = "shared_masks", e.blocks + masks
        if e.choice_packets:
            e.weight_packets = -(-config.max_tokens * config.topk * e.weight_bytes // 8)
        return announces

    @staticmethod
    def _masks_fit(config: EPConfig) -> bool:
        ranks = config.world_size
        words = _TOKENS_PER_PACKET // 32 * -(-config.max_tokens // _TOKENS_PER_PACKET)
        sums = -(-words // lib.PROXYCCL_SUMMED_WORDS)
        kept = (2 + 1) * ranks + -(-ranks * ranks // 2) + 2 * ranks * (words + sums)  # in words of 4 bytes
        return (
            ranks <= lib.PROXYCCL_MASKED_RANKS
            and config.max_tokens < 1 << 16
            and kept <= 2 * lib.PROXYCCL_ANNOUNCED_PAYLOADS
        )
