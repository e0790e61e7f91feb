"""What a device of a transport between hosts is opened for."""

from __future__ import annotations

from dataclasses import dataclass

from proxyccl.device.runtime import PinnedMemory, Runtime


@dataclass(frozen=True)
class RdmaSetup:
    """What a device is opened for: one rank.

    Attributes:
        runtime: whose device memory peers reach.
        segment: the rank's control segment.
        signals: where in it, in bytes, the words lie that peers' proxies may signal.
        near: NUMA node that the device is to be near to; None: all are equally near.
        local_rank: the rank's number on its host.
    """

    runtime: Runtime
    segment: PinnedMemory
    signals: range
    near: int | None
    local_rank: int
