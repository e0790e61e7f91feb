"""The rank for which a device of a transport between hosts is opened."""

from __future__ import annotations

from msgspec import Struct

from proxyccl.device.runtime import PinnedMemory, Runtime


class RemoteSetup(Struct, frozen=True):
    """The rank for which a device is opened.

    Attributes:
        runtime: the runtime whose device memory peers reach.
        segment: the rank's control segment.
        signals: byte range, in the control segment, of the words that peers' proxies may signal.
        near: NUMA node that the device should be near; None if all nodes are equally near.
        local_rank: the rank's number on its host.
        core_share: cores that the rank's threads may keep busy.
    """

    runtime: Runtime
    segment: PinnedMemory
    signals: range
    near: int | None
    local_rank: int
    core_share: int
