"""The fabric transport over TCP between the wire's two ends, while the wire loses and delays packets.

The machine uses the host's file system, into which `make test-rdma` has fetched libfabric.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from proxyccl import Communicator, FabricOptions
from support.packages.fabric import load_if_here
from support.ranks import Ranks
from support.soft_roce.nodes import TIMEOUT
from support.soft_roce.wire import INTERFACES, Wire
from support.transports import needs_fabric

COUNT = 50_000


def bytes_sent(interface: str) -> int:
    return int(Path("/sys/class/net", interface, "statistics/tx_bytes").read_text())


def exchange(comm: Communicator) -> None:
    given = comm.empty(2 * COUNT, "int32").upload(np.arange(2 * COUNT) + comm.rank)
    taken = comm.empty(2 * COUNT, "int32")
    comm.all_to_all(given, out=taken, algorithm="proxy")
    own = np.arange(comm.rank * COUNT, (comm.rank + 1) * COUNT)
    assert (taken.numpy().reshape(2, COUNT) == own + np.arange(2)[:, None]).all()


@pytest.mark.full
@needs_fabric
def test_an_exchange_over_a_bad_wire(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP handles loss and delay by retransmission."""
    library = load_if_here()
    if library is None:
        pytest.skip("libfabric is not installed, and could not be fetched")
    # A failed search by name is cached, so the library is set by its path.
    monkeypatch.setenv("PROXYCCL_LIBFABRIC", library)
    wire.disturb("loss", "2%", "delay", "1ms")
    before = [bytes_sent(interface) for interface in INTERFACES]
    with Ranks(
        2,
        options_of=lambda rank: {"fabric": FabricOptions(provider="tcp", interface=f"={INTERFACES[rank]}")},
        local_world_size=1,
        transport="fabric",
        timeout=TIMEOUT,
    ) as ranks:
        ranks.run(exchange)
    sent = [bytes_sent(interface) - number for interface, number in zip(INTERFACES, before, strict=True)]
    assert all(number > 4 * COUNT for number in sent), sent
