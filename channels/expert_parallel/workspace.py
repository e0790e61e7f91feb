"""The memory that expert-parallel kernels share between ranks, and its layout (device/kernels/experts.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from proxyccl.channels.expert_parallel.config import EPConfig
from proxyccl.channels.group import Group
from proxyccl.channels.memory import allocate, register
from proxyccl.channels.proxy_channel import ProxyChannel, connect_handles, free_handles
from proxyccl.channels.topology import Topology
from proxyccl.device._native import ffi, lib
from proxyccl.device.errors import ResourceError
from proxyccl.proxy.codec import Codec

ANNOUNCED_SLOTS: int = lib.PROXYCCL_ANNOUNCED_SLOTS
"""The most slots of all ranks for which ids are announced to every block, instead of counted by their source."""
FEW_TOKENS = 32
"""Tokens of a block. With more, expert ids are not announced, and on one node some blocks of a dispatch only send."""
_FLAG = Codec(bool, 16, "flag")
_LINE = 128
_PIECES = 4  # kMaxPieces of expert_team.h: weights behind a row of a combine


def _aligned(nbytes: int, to: int = _LINE) -> int:
    return -(-nbytes // to) * to


class _Areas:
    """Hands out consecutive aligned areas."""

    def __init__(self) -> None:
        self.end = 0

    def take(self, nbytes: int) -> int:
        start = self.end
        self.end = _aligned(start + nbytes)
        return start


@dataclass(frozen=True)
class Nodes:
    """The nodes of a layer. `counterpart` uses the configuration's nodes, `of` the kernels', where each rank may be a
    node.

    Attributes:
        config: of the layer.
        topology: of its ranks.
        members: for each of the kernels' nodes its ranks.
    """

    config: EPConfig
    topology: Topology
    members: list[list[int]]

    @property
    def count(self) -> int:
        """Number of the kernels' nodes."""
        return len(self.members)

    def counterpart(self, node: int) -> int:
        """The rank of one of the configuration's nodes that has this rank's number within its node."""
        members = self.topology.node_members()
        if len(members) == self.config.num_nodes:
            return members[node][self.topology.local_rank]
        return node * self.config.local_world_size + self.config.rank % self.config.local_world_size

    def of(self, rank: int) -> int:
        """A rank's node, among the kernels' nodes."""
        return next(n for n, members in enumerate(self.members) if rank in members)


class ExpertWorkspace:
    """One rank's workspace, and what kernels need to access those of other ranks. All ranks make it together.

    Ranks of a node read and write each other's workspaces. Data for another node goes through the proxy, to the rank
    with the same number there. Every rank counts as a node of its own if ranks of a node can't access each other's
    memory, if nodes have different numbers of ranks, or with `proxied`.

    With chosen_per_rank, dispatches give a row for each rank: the configuration's experts are the ranks, and each rank
    has that many experts that tokens choose.

    Attributes:
        experts: the ProxycclExperts.
        nodes: number of the kernels' nodes.
        node: this rank's.
        members: for each node its ranks.
    """

    def __init__(
        self,
        group: Group,
        config: EPConfig,
        *,
        blocks: int,
        threads: int,
        local_combine: bool,
        proxied: bool = False,
        chosen_per_rank: int = 0,
        padded_rows: int = 0,
    ) -> None:
        runtime, rank, ranks = group.runtime, group.rank, group.world_size
        if ranks > lib.PROXYCCL_MAX_EXPERT_RANKS:
            raise ResourceError(f"an expert-parallel layer serves at most {lib.PROXYCCL_MAX_EXPERT_RANKS} ranks")
        topology = group.topology
        mapped = not proxied and all(topology.accessible[peer] for peer in topology.node_ranks)
        flags = group.exchange.all_gather(mapped, _FLAG, "an expert-parallel layer")
        members = topology.node_members()
        if not all(flags) or len({len(ranks_of_node) for ranks_of_node in members}) > 1:
            members = [[peer] for peer in range(ranks)]
        self.members = members
        self.nodes, local_size = len(members), len(members[0])
        self.node = next(n for n, of_node in enumerate(members) if rank in of_node)
        local_rank = members[self.node].index(rank)

        e = self.experts = ffi.new("ProxycclExperts *")
        e.rank, e.world_size, e.local_rank, e.local_size = rank, ranks, local_rank, local_size
        e.node, e.nodes = self.node, self.nodes
        e.experts_per_rank, e.topk, e.max_tokens = config.num_experts_per_rank, config.topk, config.max_tokens
        e.local_combine, e.chosen_per_rank, e.padded_rows = local_combine, chosen_per_rank, padded_rows
        e.weight_bytes = ffi.sizeof("ProxycclExpertChoice") if chosen_per_rank else config.weight.itemsize
        e.blocks = blocks
        self._cut(config, blocks)
        self._announce(config)
        # A row may also hold a token's weights: `collect` returns them.
        row_bytes = _aligned(max(config.hidden * config.token.itemsize, config.topk * 8), 16)
        e.return_segment_bytes = e.segment_tokens * (row_bytes + 4 * _PIECES)
        e.partial_bytes = blocks * e.return_segment_bytes
        if self.nodes == 1 < local_size and blocks > 1 and e.segment_tokens > FEW_TOKENS:
            self._cut(config, blocks - self._senders(config))

        slots, routing = e.segment_tokens * config.topk, _Areas()
        routing.take(ffi.sizeof("ProxycclExpertSegment"))
        e.counts_offset = routing.take(4 * (config.num_experts + ranks * chosen_per_rank))
        e.slots_offset = routing.take(ffi.sizeof("ProxycclExpertSlot") * slots)
        e.places_offset = routing.take(4 * e.segment_tokens)
        e.weights_offset = routing.take(e.weight_bytes * slots)
        e.routing_bytes = routing.end
        e.segment_bytes = e.segment_tokens * row_bytes
        e.slab_bytes = _aligned(e.segments * (e.routing_bytes + e.segment_bytes))

        groups = threads  # at most, as only a kernel knows how many threads make a group
        areas, crossing = _Areas(), 2 * self.nodes if self.nodes > 1 else 0
        e.routed = areas.take(8 * ranks * e.segments)
        e.sent = areas.take(8 * ranks * blocks * groups)
        e.read = areas.take(8 * local_size * e.segments)
        e.returned = areas.take(8 * local_size * blocks)
        e.summed = areas.take(8 * local_size * blocks)
        e.announced = areas.take(2 * 16 * ranks * (1 + e.id_packets + e.weight_packets) if e.id_packets else 0)
        e.inbox = areas.take((2 if e.id_packets else 1) * local_size * e.slab_bytes)
        e.rail, e.outbox = areas.take(crossing * e.slab_bytes), areas.take(crossing * e.slab_bytes)
        own_returns = local_size if local_combine else config.topk
        e.returns = areas.take(own_returns * e.partial_bytes)
        e.return_rails = areas.take(self.nodes * config.topk * e.partial_bytes if crossing else 0)
        e.partial_in, e.partial_out = areas.take(crossing * e.partial_bytes), areas.take(crossing * e.partial_bytes)

        self._workspace = allocate(group, (areas.end,), "uint8")
        self._memory = memory = register(group, self._workspace)
        rails = [of_node[local_rank] for n, of_node in enumerate(members) if n != self.node]
        channels: dict[int, list[ProxyChannel]] = {}
        self._kept: object = None
        if self.nodes > 1:
            channels, self._kept = connect_handles(group, memory, memory, rails, 2 * blocks)
        self._group, self._channels = group, channels

        tables = _Areas()
        handle = ffi.sizeof("ProxycclProxyChannel")
        places_at, members_at = tables.take(4 * ranks), tables.take(4 * ranks)
        peers_at, bases_at = tables.take(8 * local_size), tables.take(8 * e.segments * config.num_experts)
        counters_at = tables.take(ffi.sizeof("ProxycclExpertCounters"))
        out_at, back_at = tables.take(self.nodes * blocks * handle), tables.take(self.nodes * blocks * handle)
        self._tables = runtime.allocate(tables.end)
        self._chosen_at = _aligned(ffi.sizeof("ProxycclReceivedRows"))
        self._received_rows = runtime.allocate_pinned(max(4096, self._chosen_at + 4 * chosen_per_rank))
        image = bytearray(tables.end)

        def put(offset: int, data: bytes) -> None:
            image[offset : offset + len(data)] = data

        place_of = {peer: n << 16 | i for n, of_node in enumerate(members) for i, peer in enumerate(of_node)}
        put(places_at, bytes(ffi.buffer(ffi.new("uint32_t[]", [place_of[peer] for peer in range(ranks)]))))
        put(members_at, bytes(ffi.buffer(ffi.new("uint32_t[]", [peer for of_node in members for peer in of_node]))))
        peers = [memory.peer_ptr(peer) for peer in members[self.node]]
        put(peers_at, bytes(ffi.buffer(ffi.new("uint64_t[]", peers))))
        for n, of_node in enumerate(members):
            for i, channel in enumerate(channels.get(of_node[local_rank], ())):
                area, block = (out_at, i) if i < blocks else (back_at, i - blocks)
                put(area + (n * blocks + block) * handle, channel.device_handle)
        runtime.copy(self._tables.ptr, int(ffi.cast("uintptr_t", ffi.from_buffer(image))), len(image))

        at = self._tables.ptr
        e.places, e.members = ffi.cast("uint32_t *", at + places_at), ffi.cast("uint32_t *", at + members_at)
        e.control = ffi.cast("ProxycclControl *", group.control.device_pointer)
        e.workspace, e.peers = ffi.cast("char *", memory.ptr), ffi.cast("char **", at + peers_at)
        e.out_channels = ffi.cast("ProxycclProxyChannel *", at + out_at)
        e.back_channels = ffi.cast("ProxycclProxyChannel *", at + back_at)
        e.bases = ffi.cast("uint32_t *", at + bases_at)
        e.received_rows = ffi.cast("ProxycclReceivedRows *", self._received_rows.ptr)
        e.chosen_rows = ffi.cast("uint32_t *", self._received_rows.ptr + self._chosen_at)
        e.counters = ffi.cast("ProxycclExpertCounters *", at + counters_at)

    def _cut(self, config: EPConfig, segments: int) -> None:
        self.experts.segments, self.experts.segment_tokens = segments, -(-config.max_tokens // segments)

    def _senders(self, config: EPConfig) -> int:
        """How many blocks of a dispatch only send.

        A multiprocessor issues stores in order, so stores to its own memory would wait behind those that wait for a
        link. Therefore a block either sends or receives. The blocks are divided in proportion to the bytes that each
        side loads and stores per token, if experts are chosen evenly. A byte stored in a peer's memory counts 4/3, as
        measured on 4 H200.
        """
        ranks, blocks = int(self.experts.local_size), int(self.experts.blocks)
        arriving = ranks * (1 - (1 - 1 / ranks) ** config.topk)  # number of ranks at which a token has an expert
        sent, received = 1 + arriving * (1 - 1 / ranks) * 4 / 3, arriving + config.topk
        return max(1, round(blocks * sent / (sent + received)))

    def _announce(self, config: EPConfig) -> None:
        """Decides whether expert ids are announced, and in how many packets. All ranks decide alike."""
        e = self.experts
        ids = -(-config.max_tokens * config.topk // lib.PROXYCCL_IDS_PER_PACKET)
        own = e.segment_tokens * config.topk
        if (
            self.nodes == 1
            and config.num_experts <= lib.PROXYCCL_ANNOUNCED_EXPERTS
            and config.world_size * ids * lib.PROXYCCL_IDS_PER_PACKET <= ANNOUNCED_SLOTS
            and config.world_size * own <= lib.PROXYCCL_ANNOUNCED_OWN_SLOTS
            and own <= lib.PROXYCCL_ANNOUNCED_SEGMENT_SLOTS
            and e.segment_tokens <= FEW_TOKENS
        ):
            e.id_packets = ids
            e.weight_packets = -(-config.max_tokens * config.topk * e.weight_bytes // 8)

    @property
    def received_rows(self) -> Any:
        """The ProxycclReceivedRows, at its address on the CPU."""
        return ffi.cast("ProxycclReceivedRows *", self._received_rows.host_ptr)

    @property
    def chosen_rows(self) -> list[int]:
        """With a row for each rank: choices of each of this rank's experts in the dispatch that was counted last."""
        numbers = ffi.cast("uint32_t *", self._received_rows.host_ptr + self._chosen_at)
        return [int(numbers[expert]) for expert in range(self.experts.chosen_per_rank)]

    def close(self) -> None:
        """Frees memory and channels. No kernel of any rank may still use them, and all proxies must have drained."""
        if not self._group.failure.closed:
            free_handles(self._group, self._channels)
        self._memory.close()
        self._workspace.free()
        self._tables.close()
        self._received_rows.close()
