"""Agents that reach each other by libfabric's verbs, over the wire between the two devices."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from proxyccl.channels.transfers import paths
from proxyccl.device.arrays.array import Array
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.transfer import Agent, NotRegisteredError, strided
from support.devices import rank_runtime
from support.packages.fabric import load_if_here
from support.soft_roce.endpoint import MTU
from support.soft_roce.nodes import TIMEOUT
from support.soft_roce.wire import ADDRESSES, DEVICES, INTERFACES, packets_sent
from support.transports import needs_fabric

NBYTES = 200_000

pytestmark = needs_fabric


class TwoHosts:
    """Agents a and b, one on each RDMA device, each with an array in host memory and one in device memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        random = np.random.default_rng(5)
        self.agents, self.hosts, self.arrays = [], [], []
        for name, device, address in zip("ab", DEVICES, ADDRESSES, strict=True):
            monkeypatch.setenv("PROXYCCL_FABRIC", f"provider=verbs,interface=={device}")
            self.agents.append(Agent(name, listen=[address], paths=["fabric", "tcp"], timeout=TIMEOUT))
            runtime = rank_runtime(len(self.arrays))
            self.hosts.append(random.integers(0, 256, NBYTES, dtype=np.uint8))
            self.arrays.append(Array(runtime, runtime.allocate(NBYTES), (NBYTES,), as_dtype("uint8")))
            self.arrays[-1].upload(random.integers(0, 256, NBYTES, dtype=np.uint8))
        self.regions = [
            (agent.register(host), agent.register(array))
            for agent, host, array in zip(self.agents, self.hosts, self.arrays, strict=True)
        ]
        self.agents[0].add(self.agents[1].metadata())


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoHosts]:
    library = load_if_here()
    if library is None:
        pytest.skip("libfabric is not installed, and could not be fetched")
    # A failed search by name is cached, so the library is set by its path.
    monkeypatch.setenv("PROXYCCL_LIBFABRIC", library)
    monkeypatch.setattr(paths, "boot_id", lambda: "another host")
    made = TwoHosts(monkeypatch)
    yield made
    for agent in made.agents:
        agent.close()


def test_blocks_arrive_where_they_belong(two: TwoHosts) -> None:
    """Reads and writes blocks of host and device memory. Then a transfer of memory that the peer has deregistered must
    fail.
    """
    (a, b), before = two.agents, sum(map(packets_sent, INTERFACES))
    near, far = two.regions
    rows = strided(near[0].address, far[0].address, 1003, 60, 1501, 2003)
    transfer = a.prepare("read", "b", rows)
    assert transfer.path.name == "fabric (verbs;ofi_rxm)"
    transfer.start().wait(TIMEOUT)
    for start, end in ((number * 1501, number * 2003) for number in range(60)):
        np.testing.assert_array_equal(two.hosts[0][start : start + 1003], two.hosts[1][end : end + 1003])
    transfer = a.prepare("write", "b", [(near[1].address, far[1].address, NBYTES)])
    assert transfer.path.name == "fabric (verbs;ofi_rxm, device memory)"
    transfer.start(b"written").wait(TIMEOUT)
    b.wait_for_message(TIMEOUT)
    assert b.messages() == [("a", b"written")]
    np.testing.assert_array_equal(two.arrays[1].numpy(), two.arrays[0].numpy())
    assert sum(map(packets_sent, INTERFACES)) - before > NBYTES // MTU
    b.deregister(far[0])
    with pytest.raises(NotRegisteredError, match=f"remote address {far[0].address:#x} are not registered by agent b"):
        a.read("b", [(near[0].address, far[0].address, 100)]).wait(TIMEOUT)
