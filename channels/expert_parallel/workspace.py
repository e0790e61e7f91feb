"""The memory that expert-parallel kernels share between ranks, and its layout (device/kernels/experts/experts.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from proxyccl.channels.expert_parallel.config import EPConfig
from proxyccl.channels.expert_parallel.geometry import Areas, Geometry, OutputLayout, aligned
from proxyccl.channels.expert_parallel.kept_outputs import KeptOutputs
from proxyccl.channels.expert_parallel.output_buffers import OutputBuffers
from proxyccl.channels.group import Group
from proxyccl.channels.joining.topology import Topology
from proxyccl.channels.memory import allocate, register
from proxyccl.channels.proxy_channel import ProxyChannel, connect_handles, free_handles
from proxyccl.device._native import ffi, lib
from proxyccl.device.errors import ResourceError
from proxyccl.device.memory.places import own_segment_bytes
from proxyccl.proxy.codec import Codec

_FLAG = Codec(bool, 16, "flag")


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

    The layout's output buffers are part of the workspace. Their rows have scale_bytes of scales or are as long as
    tokens, whichever is more.

    Attributes:
        experts: the ProxycclExperts. It has output buffers only on one node whose ranks reach each other.
        announces: see `Geometry`.
        nodes: number of the kernels' nodes.
        node: this rank's.
        members: for each node its ranks.
        outputs: the output buffers, or None.
    """

    def __init__(
        self,
        group: Group,
        config: EPConfig,
        layout: OutputLayout,
        *,
        blocks: int,
        threads: int,
        local_combine: bool,
        proxied: bool = False,
        scale_bytes: int = 0,
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

        geometry = Geometry(
            config,
            layout,
            nodes=self.nodes,
            local_size=local_size,
            blocks=blocks,
            threads=threads,
            local_combine=local_combine,
            scale_bytes=scale_bytes,
            output_room=own_segment_bytes if layout.stays and runtime.name != "host" else aligned,
        )
        e, self.announces = geometry.experts, geometry.announces
        self.experts = e
        e.rank, e.local_rank, e.node = rank, local_rank, self.node
        self._workspace = allocate(group, (geometry.workspace_bytes,), "uint8")
        self._memory = memory = register(group, self._workspace)
        rails = [of_node[local_rank] for n, of_node in enumerate(members) if n != self.node]
        channels: dict[int, list[ProxyChannel]] = {}
        self._kept: object = None
        if self.nodes > 1:
            channels, self._kept = connect_handles(group, memory, memory, rails, 2 * blocks)
        self._group, self._channels = group, channels
        outputs = KeptOutputs if layout.stays else OutputBuffers
        self.outputs = outputs(runtime, self._workspace.memory, e) if e.output_buffers else None

        tables = Areas()
        handle = ffi.sizeof("ProxycclProxyChannel")
        places_at, members_at = tables.take(4 * ranks), tables.take(4 * ranks)
        first_rows = 2 * 4 * blocks * ranks * e.segments if e.output_buffers else 0
        peers_at = tables.take(8 * local_size)
        bases_at = tables.take(max(8 * e.segments * config.num_experts, first_rows))
        counters_at = tables.take(ffi.sizeof("ProxycclExpertCounters"))
        out_at, back_at = tables.take(self.nodes * blocks * handle), tables.take(self.nodes * blocks * handle)
        self._tables = runtime.allocate(tables.end)
        self._chosen_at = aligned(ffi.sizeof("ProxycclReceivedRows"))
        self._told_experts = layout.chosen_per_rank or (config.num_experts_per_rank if layout.expert_alignment else 0)
        self._received_rows = runtime.allocate_pinned(max(4096, self._chosen_at + 4 * self._told_experts))
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

    @property
    def received_rows(self) -> Any:
        """The ProxycclReceivedRows, at its address on the CPU."""
        return ffi.cast("ProxycclReceivedRows *", self._received_rows.host_ptr)

    @property
    def chosen_rows(self) -> list[int]:
        """With a row for each rank, or with expert_alignment: choices of each of this rank's experts in the dispatch
        that was counted last.
        """
        numbers = ffi.cast("char *", self._received_rows.host_ptr + self._chosen_at)
        return memoryview(ffi.buffer(numbers, 4 * self._told_experts)).cast("I").tolist()

    def close(self) -> None:
        """Frees memory and channels. No kernel of any rank may still use them, and all proxies must have drained."""
        if not self._group.failure.closed:
            free_handles(self._group, self._channels)
        self._memory.close()
        if self.outputs is None:
            self._workspace.free()
        else:  # the caller may have outputs still: the last of them frees it
            self.outputs.close()
            del self._workspace, self.outputs
        self._tables.close()
        self._received_rows.close()
