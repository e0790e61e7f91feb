"""Finds out for two of the examples which channel moved a communicator's data, and how many bytes the proxies moved."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from proxyccl import Communicator
from proxyccl.proxy.trigger import MAX_CHANNELS


@dataclass(frozen=True)
class ProxyTraffic:
    """The traffic of all ranks' proxies, caused by triggers of kernels and by collectives that streams started.

    Attributes:
        triggers: triggers that kernels pushed.
        puts: transfers of data.
        bytes: bytes that the puts moved.
    """

    triggers: int
    puts: int
    bytes: int

    def __sub__(self, earlier: ProxyTraffic) -> ProxyTraffic:
        return ProxyTraffic(self.triggers - earlier.triggers, self.puts - earlier.puts, self.bytes - earlier.bytes)


def proxy_traffic(comm: Communicator) -> ProxyTraffic:
    """Returns the sum of the counters of all channels on all ranks. All ranks make this call together."""
    comm.barrier()
    comm.synchronize()  # no transfer is pending, so the counters are complete
    own = np.zeros(3, np.int64)
    proxy = comm.proxy_if_started
    if proxy is not None:
        for channel in range(MAX_CHANNELS):
            counters = proxy.counters(channel)
            own += counters.triggers, counters.puts, counters.bytes
    total = comm.empty(3, "int64").upload(own)
    comm.all_reduce(total)
    return ProxyTraffic(*total.numpy().tolist())


def channels_used(comm: Communicator, *, proxied: bool) -> str:
    """Returns the kind of channel through which this rank sends a collective's data.

    Args:
        comm: the ranks.
        proxied: whether the program asked for the proxy by name.
    """
    mapped = [comm.topology.accessible[peer] for peer in range(comm.world_size) if peer != comm.rank]
    if not mapped:
        return "none"
    if proxied or not any(mapped):
        return "ProxyChannel"
    return "SmChannel" if all(mapped) else "SmChannel and ProxyChannel"
