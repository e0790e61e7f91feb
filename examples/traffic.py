"""What moved a communicator's data, and how much the proxies moved: shared by the examples that report it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from proxyccl import Communicator
from proxyccl.proxy.trigger import MAX_CHANNELS


@dataclass(frozen=True)
class ProxyTraffic:
    """Triggers, and bytes that they moved, over all ranks."""

    triggers: int
    bytes: int

    def __sub__(self, earlier: ProxyTraffic) -> ProxyTraffic:
        return ProxyTraffic(self.triggers - earlier.triggers, self.bytes - earlier.bytes)


def proxy_traffic(comm: Communicator) -> ProxyTraffic:
    """The sum over all channels of all ranks up to now. All ranks call this together."""
    comm.barrier()
    comm.synchronize()  # no rank still waits for a trigger, so all of them are counted
    own = np.zeros(2, np.int64)
    proxy = comm.proxy_if_started
    if proxy is not None:
        for channel in range(MAX_CHANNELS):
            counters = proxy.counters(channel)
            own += counters.triggers, counters.bytes
    total = comm.empty(2, "int64").upload(own)
    comm.all_reduce(total)
    triggers, moved = total.numpy()
    return ProxyTraffic(int(triggers), int(moved))


def channels_used(comm: Communicator, *, proxied: bool) -> str:
    """Which kind of channel carries a collective's data from this rank to its peers.

    Args:
        comm: the ranks.
        proxied: whether the proxy was asked for by name.
    """
    mapped = [comm.topology.accessible[peer] for peer in range(comm.world_size) if peer != comm.rank]
    if not mapped:
        return "none"
    if proxied or not any(mapped):
        return "ProxyChannel"
    return "SmChannel" if all(mapped) else "SmChannel and ProxyChannel"
