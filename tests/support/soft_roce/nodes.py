"""Divides ranks into two nodes with one Soft-RoCE device each, so that all data between nodes crosses the wire."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from proxyccl import ProxyCCLError, RdmaOptions
from support.ranks import Ranks
from support.soft_roce.wire import DEVICES

RANKS, LOCAL = 4, 2
TIMEOUT = 60.0
"""Time limit of waits in tests that do not test time-outs. The emulated machine is about 20 times slower."""
_BOUND = 60.0


def rdma_of(rank: int, local: int = LOCAL, **options: Any) -> dict[str, Any]:
    """Returns a rank's communicator options, with the RDMA device of the rank's node."""
    return {"rdma": RdmaOptions(device=DEVICES[rank // local % len(DEVICES)], **options)}


def two_nodes(local: int = LOCAL, **options: Any) -> Ranks:
    """Returns ranks on two nodes of `local` ranks each; `options` are those of `RdmaOptions`."""
    return Ranks(
        2 * local,
        options_of=lambda rank: rdma_of(rank, local, **options),
        local_world_size=local,
        timeout=TIMEOUT,
    )


def failure_of(call: Callable[[], object]) -> ProxyCCLError:
    """Makes a call, asserts that it raises an error in time, and returns the error."""
    began = time.monotonic()
    with pytest.raises(ProxyCCLError) as caught:
        call()
    assert time.monotonic() - began < _BOUND
    return caught.value
