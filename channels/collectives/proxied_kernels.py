"""How much kernels send to other nodes through the proxy, and by way of which memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxyccl.channels.group import Group


def sends_through_pinned_memory(group: Group) -> bool:
    """Whether kernels send to other nodes through pinned memory; the same on all ranks."""
    return group.runtime.launch_defaults.pinned_kernel_bytes > 0 and group.topology.stages_remote_pairs()


def proxied_kernel_bytes(group: Group) -> int:
    """The longest share that kernels move to peers of other nodes, by default, through the proxy; the same on all
    ranks. 0: they move none.
    """
    defaults = group.runtime.launch_defaults
    if defaults.proxied_kernel_bytes > 0 or not sends_through_pinned_memory(group):
        return defaults.proxied_kernel_bytes
    return defaults.pinned_kernel_bytes // max(1, group.world_size - min(map(len, group.topology.node_members())))
