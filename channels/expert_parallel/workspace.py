"""The memory that expert-parallel kernels share between ranks, and its layout (device/kernels/experts/experts.h)."""

from __future__ import annotations

from collections.abc import Callable

from proxyccl.channels.expert_parallel.geometry import Areas, Geometry, aligned
from proxyccl.channels.expert_parallel.members import Nodes
from proxyccl.channels.expert_parallel.options import LayerOptions
from proxyccl.channels.expert_parallel.output_buffers import KeptOutputs, OutputBuffers
from proxyccl.channels.group import Group
from proxyccl.channels.memory import register
from proxyccl.channels.proxy_channel import ProxyChannel, connect_handles, free_handles
from proxyccl.device._native import ffi, lib
from proxyccl.device.arrays.array import Array
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.errors import ResourceError
from proxyccl.device.memory.places import own_segment_bytes


class ExpertWorkspace:
    """One rank's workspace, and the addresses and channels by which kernels reach other ranks' workspaces. All ranks
    construct an `ExpertWorkspace` together. Ranks of a node read and write each other's workspaces. Data for another
    node goes through the proxy, to the rank of that node with the same local rank as this rank.

    Attributes:
        experts: the ProxycclExperts, which has output buffers only on one node whose ranks reach each other.
        announces: see `Geometry`.
        sleepers: wakes the proxy that sends data to other nodes; None on one node.
        outputs: the output buffers, or None.
        received_rows: a pointer for the CPU to the ProxycclReceivedRows in pinned memory.
        in_halves: functions that return whether the first half of a call is queued, so that the workspace holds the
            call's rows.
    """

    def __init__(self, group: Group, nodes: Nodes, options: LayerOptions, grid: tuple[int, int]) -> None:
        if group.world_size > lib.PROXYCCL_MAX_EXPERT_RANKS:
            raise ResourceError(f"an expert-parallel layer serves at most {lib.PROXYCCL_MAX_EXPERT_RANKS} ranks")
        self._group, self._nodes, self._options, (self._blocks, threads) = group, nodes, options, grid
        self.in_halves: list[Callable[[], bool]] = []
        room = own_segment_bytes if options.keeps_outputs and group.runtime.name != "host" else aligned
        sizes = {"blocks": self._blocks, "threads": threads, "nodes": nodes.count, "local_size": nodes.local_size}
        geometry = Geometry(options, **sizes, copied=nodes.copied(group), output_room=room)
        self.experts, self.announces = geometry.experts, geometry.announces
        self.experts.rank, self.experts.local_rank, self.experts.node = group.rank, nodes.local_rank, nodes.own
        self._share(geometry.workspace_bytes)
        self._make_tables()
        self._make_received_rows()

    def _share(self, nbytes: int) -> None:
        group, nodes, e = self._group, self._nodes, self.experts
        # Kernels continue to count the signals in these areas after the communicator was suspended.
        signals = ((0, int(e.inbox)), (int(e.loadable), 2 * 8 * nodes.local_size * self._blocks))
        in_halves = self.in_halves  # `device_memory` must not keep this object alive
        allocated = group.device_memory.allocate(
            nbytes, "experts", lambda: None if any(each() for each in in_halves) else signals
        )
        self._workspace = Array(group.runtime, allocated, (nbytes,), as_dtype("uint8"))
        self._memory = memory = register(group, self._workspace)
        self._channels: dict[int, list[ProxyChannel]] = {}
        self._kept: object = None
        if nodes.count > 1:
            rails = [peer for peer in nodes.rails if peer != group.rank]
            self._channels, self._kept = connect_handles(group, memory, memory, rails, 2 * self._blocks + 1)
        self.sleepers = group.links.proxy.sleepers if self._channels else None
        outputs = KeptOutputs if self._options.keeps_outputs else OutputBuffers
        self.outputs = outputs(group.runtime, self._workspace.memory, e) if e.output_buffers else None
        e.control = ffi.cast("ProxycclControl *", group.control.device_pointer)
        e.workspace = ffi.cast("char *", memory.ptr)

    def _make_tables(self) -> None:
        nodes, e, blocks = self._nodes, self.experts, self._blocks
        ranks, handle = self._group.world_size, ffi.sizeof("ProxycclProxyChannel")
        place_of = {peer: n << 16 | i for n, of_node in enumerate(nodes.members) for i, peer in enumerate(of_node)}
        in_order = [peer for of_node in nodes.members for peer in of_node]
        peers = [self._memory.peer_ptr(peer) for peer in nodes.members[nodes.own]]
        first_rows = 2 * 4 * blocks * ranks * e.segments if e.output_buffers else 0

        def handles(first: int, count: int) -> bytes:
            """Returns the handles of these channels to each node; zeros for the rank's own node."""
            of_rails = [self._channels.get(rail, ())[first : first + count] for rail in nodes.rails]
            joined = [b"".join(channel.device_handle for channel in channels) for channels in of_rails]
            return b"".join(each.ljust(count * handle, b"\0") for each in joined)

        contents = {  # the contents of each field's table
            "places": bytes(ffi.buffer(ffi.new("uint32_t[]", [place_of[peer] for peer in range(ranks)]))),
            "members": bytes(ffi.buffer(ffi.new("uint32_t[]", in_order))),
            "peers": bytes(ffi.buffer(ffi.new("uint64_t[]", peers))),
            "bases": bytes(max(8 * e.segments * self._options.kernel_config.num_experts, first_rows)),
            "counters": bytes(ffi.sizeof("ProxycclExpertCounters")),
            "arrivals": bytes(4 * (nodes.count * blocks + 1)),
            "routing_channels": handles(2 * blocks, 1),
            "out_channels": handles(0, blocks),
            "back_channels": handles(blocks, blocks),
        }
        areas, types = Areas(), dict(ffi.typeof("ProxycclExperts").fields)
        places = {name: areas.take(len(content)) for name, content in contents.items()}
        image = bytearray(areas.end)
        for name, content in contents.items():
            image[places[name] : places[name] + len(content)] = content
        self._tables = self._group.device_memory.allocate(areas.end, "experts")
        self._group.runtime.copy(self._tables.ptr, int(ffi.cast("uintptr_t", ffi.from_buffer(image))), len(image))
        for name, place in places.items():
            setattr(e, name, ffi.cast(types[name].type, self._tables.ptr + place))

    def _make_received_rows(self) -> None:
        options = self._options
        self._chosen_at = aligned(ffi.sizeof("ProxycclReceivedRows"))
        self._told_experts = options.config.num_experts_per_rank if options.by_rank or options.expert_alignment else 0
        nbytes = max(4096, self._chosen_at + 4 * self._told_experts)
        self._received_rows = self._group.runtime.allocate_pinned(nbytes)
        self.experts.received_rows = ffi.cast("ProxycclReceivedRows *", self._received_rows.ptr)
        self.experts.chosen_rows = ffi.cast("uint32_t *", self._received_rows.ptr + self._chosen_at)
        self.received_rows = ffi.cast("ProxycclReceivedRows *", self._received_rows.host_ptr)
        self.received_rows.bad_rank = lib.PROXYCCL_NO_PEER

    @property
    def chosen_rows(self) -> list[int]:
        """The number of slots that chose each of this rank's experts in the latest dispatch that counted slots. The
        numbers are valid only with layout="rank" or expert_alignment.
        """
        numbers = ffi.cast("char *", self._received_rows.host_ptr + self._chosen_at)
        return memoryview(ffi.buffer(numbers, 4 * self._told_experts)).cast("I").tolist()

    def close(self) -> None:
        """Frees memory and channels. All kernels of all ranks must have completed, and all proxies must have carried
        out their triggers.
        """
        if not self._group.failure.closed:
            free_handles(self._group, self._channels)
        self._memory.close()
        if self.outputs is None:
            self._workspace.free()
        else:  # the caller may still hold outputs, so the memory is freed with the last output
            self.outputs.close()
            del self._workspace, self.outputs
        self._tables.close()
        self._received_rows.close()
