"""The links of a team or of flows: from this rank to each peer, as many as there are lanes."""

from __future__ import annotations

from collections.abc import Sequence

from proxyccl.channels.group import Group
from proxyccl.channels.memory import RegisteredMemory
from proxyccl.channels.pinned_memory import PinnedRange
from proxyccl.channels.proxy_channel import ProxyChannel, connect_handles
from proxyccl.channels.sm_channel import SmSemaphores
from proxyccl.device._native import ffi


class Links:
    """A table of ProxycclLink (team.h), [lanes][members]. All ranks make it together.

    Args:
        group: whose ranks.
        memory: the scratch memory that peers write to.
        proxied: the same, for proxies.
        members: the ranks of the table's columns.
        via_proxy: those that are reached through the proxy; all others except this rank are mapped.
        lanes: links to each peer.
        proxied_anywhere: whether any rank of the group reaches a peer through the proxy.

    Attributes:
        table: the links.
        proxy_channels: by peer, the channels of its lanes.
        sleepers: of the proxy that they go through; None if there are none.
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

    @property
    def raw(self) -> bytes:
        """The table's bytes."""
        return bytes(ffi.buffer(self.table))

    def close(self) -> None:
        """Frees the semaphores' own words. Kernels of this rank must have ended."""
        self._semaphores.close()
