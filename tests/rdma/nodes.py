"""Ranks as two nodes: each has one of the machine's two devices, so what leaves a node crosses the wire."""

from __future__ import annotations

from typing import Any

from ranks import Ranks

from proxyccl import RdmaOptions
from rdma.wire import DEVICES

RANKS, LOCAL = 4, 2
TIMEOUT = 60.0
"""Bound of waits that are not about time-outs: everything is emulated here, and so takes 20 times as long."""


def rdma_of(rank: int, local: int = LOCAL, **options: Any) -> dict[str, Any]:
    """A rank's RDMA options: its node's device."""
    return {"rdma": RdmaOptions(device=DEVICES[rank // local % len(DEVICES)], **options)}


def two_nodes(local: int = LOCAL, **options: Any) -> Ranks:
    """Two nodes of `local` ranks; options as for `RdmaOptions`."""
    return Ranks(
        2 * local,
        options_of=lambda rank: rdma_of(rank, local, **options),
        local_world_size=local,
        timeout=TIMEOUT,
    )
