"""Agents with several interfaces over libfabric's TCP provider. Hosts are network namespaces of this machine. For each
agent, the test's process has a thread in the namespace of the agent's host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from proxyccl.device.arrays.array import Array
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.errors import RuntimeUnavailableError
from proxyccl.proxy.fabric.endpoint import FabricEndpoint
from proxyccl.proxy.fabric.library import load
from proxyccl.transfer import Agent, State, TransferTimeoutError, strided
from support.devices import rank_runtime
from support.hosts.networks import Hosts, hosts_or_skip
from support.packages.fabric import library_or_skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.host_only(reason="agents on hosts without GPUs"),
    pytest.mark.filterwarnings("ignore:agent .* through a socket:RuntimeWarning"),
]

NBYTES = 16 << 20
SECONDS = 60
BOTH = ("eth1", "eth2")
NUMBER = {"eth1": 1, "eth2": 2}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosts_or_skip(2, interfaces=3) as made:
        yield made


@pytest.fixture(autouse=True)
def found_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PROXYCCL_LIBFABRIC", library_or_skip())
    load.cache_clear()
    yield
    load.cache_clear()


class Pair:
    """Agents "0" and "1" on the hosts of these numbers, each with `NBYTES` of registered memory. The agents' links use
    interface 0. Agent 0 has added agent 1.
    """

    def __init__(self, hosts: Hosts, monkeypatch: pytest.MonkeyPatch, *interfaces: tuple[str, ...]) -> None:
        self._threads = [ThreadPoolExecutor(1, initializer=hosts.enter, initargs=(host,)) for host in range(2)]
        self.memory = [np.random.default_rng(seed).integers(0, 256, NBYTES, dtype=np.uint8) for seed in range(2)]
        self.agents: list[Agent] = []
        for host, names in enumerate(interfaces):
            option = f"interface=={names[0]}" if len(names) == 1 else f"interfaces={','.join(names)}"
            monkeypatch.setenv("PROXYCCL_FABRIC", f"provider=tcp,{option}")
            self.agents.append(self.on(host, Agent, str(host), listen=[hosts.address(host)], paths=["fabric"]))
        self.regions = [self.on(host, self.agents[host].register, self.memory[host]) for host in range(2)]
        self.on(0, self.agents[0].add, self.agents[1].metadata())

    def on(self, host: int, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Returns the result of a call on a host."""
        return self._threads[host].submit(call, *arguments, **named).result(2 * SECONDS)

    def prepare(self, operation: str, blocks: Any) -> Any:
        """Prepares a transfer of agent 0. `blocks` are rows of (offset on host 0, offset on host 1, bytes)."""
        base = np.array([self.regions[0].address, self.regions[1].address, 0], np.uint64)
        return self.on(0, self.agents[0].prepare, operation, "1", np.asarray(blocks, np.uint64) + base)

    def close(self) -> None:
        for host, agent in enumerate(self.agents):
            self.on(host, agent.close)
            self._threads[host].shutdown()


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("interfaces", [(BOTH, BOTH), (BOTH, ("eth1",)), (("eth2",), ("eth2", "eth1"))])
def test_blocks_arrive_over_all_interfaces_that_both_agents_have(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, operation: str, interfaces: tuple[tuple[str, ...], tuple[str, ...]]
) -> None:
    pair = Pair(hosts, monkeypatch, *interfaces)
    rows = np.concatenate((strided(0, 0, 1003, 2000, 1501, 2003), [(8 << 20, 9 << 20, (6 << 20) + 1)])).astype(int)
    to, source = (0, 1) if operation == "read" else (1, 0)
    expected = pair.memory[to].copy()
    for row in rows:
        expected[row[to] : row[to] + row[2]] = pair.memory[source][row[source] : row[source] + row[2]]
    transfer = pair.prepare(operation, rows)
    before = [hosts.received(to, NUMBER[name]) for name in BOTH]
    pair.on(0, transfer.start, b"arrived")
    pair.on(0, transfer.wait, SECONDS)
    pair.on(1, pair.agents[1].wait_for_message, SECONDS)
    np.testing.assert_array_equal(pair.memory[to], expected)
    assert pair.on(1, pair.agents[1].messages) == [("0", b"arrived")]
    carried = [hosts.received(to, NUMBER[name]) - then for name, then in zip(BOTH, before, strict=True)]
    common = set(interfaces[0]).intersection(interfaces[1])
    for name, nbytes in zip(BOTH, carried, strict=True):
        share = rows[:, 2].sum() / len(common) if name in common else 0
        assert 0.7 * share <= nbytes <= 1.3 * share + 100_000, carried
    pair.close()


@pytest.mark.filterwarnings("ignore:agent .* stages memory of devices through:RuntimeWarning")
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("kinds", [("device", "device"), ("device", "host"), ("host", "device")])
def test_staged_memory_of_devices_arrives_over_both_interfaces(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, operation: str, kinds: tuple[str, str]
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeUnavailableError("tcp does not reach memory of these GPUs")

    monkeypatch.setattr(FabricEndpoint, "register_of", refuse)
    pair = Pair(hosts, monkeypatch, BOTH, BOTH)
    to = 0 if operation == "read" else 1
    arrays: list[Any] = list(pair.memory)
    for host in (host for host, kind in enumerate(kinds) if kind == "device"):
        runtime = rank_runtime(host)
        arrays[host] = Array(runtime, runtime.allocate(NBYTES), (NBYTES,), as_dtype("uint8"))
        arrays[host].upload(pair.memory[host])
        pair.regions[host] = pair.on(host, pair.agents[host].register, arrays[host])
    pair.on(0, pair.agents[0].add, pair.agents[1].metadata())
    before = [hosts.received(to, NUMBER[name]) for name in BOTH]
    rows = np.concatenate((strided(0, 0, 1003, 2000, 1501, 2003), [(6 << 20, 7 << 20, 5 << 20)])).astype(int)
    transfer = pair.prepare(operation, rows)
    assert "staged" in transfer.path.name
    pair.on(0, transfer.start)
    pair.on(0, transfer.wait, SECONDS)
    moved = [array.numpy() if isinstance(array, Array) else array for array in arrays]
    for row in rows:
        np.testing.assert_array_equal(*(end[at:][: row[2]] for end, at in zip(moved, row[:2], strict=True)))
    assert all(hosts.received(to, NUMBER[name]) - then > 2 << 20 for name, then in zip(BOTH, before, strict=True))
    pair.close()


@pytest.mark.parametrize(("operation", "failure"), [("read", "cut"), ("write", "lose")])
def test_an_interface_that_fails_holds_up_only_the_transfers_that_use_it_then(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, operation: str, failure: str
) -> None:
    """The transfer that uses the failed interface sends no message before all its bytes have arrived."""
    pair = Pair(hosts, monkeypatch, BOTH, BOTH)
    to, source = (0, 1) if operation == "read" else (1, 0)
    half = NBYTES // 2
    first, later = pair.prepare(operation, [(0, 0, half)]), pair.prepare(operation, [(half, half, half)])
    pair.on(0, first.start)
    pair.on(0, first.wait, SECONDS)
    pair.memory[source][:half] ^= 0xFF
    getattr(hosts, failure)(1, NUMBER["eth1"])
    try:
        pair.on(0, first.start, b"first")
        with pytest.raises(TransferTimeoutError, match="active after 3 s; no request by eth1 has completed for 2 s"):
            pair.on(0, first.wait, 3)
        for _ in range(2):
            pair.on(0, later.start, b"later")
            pair.on(0, later.wait, SECONDS)
            pair.on(1, pair.agents[1].wait_for_message, SECONDS)
            assert pair.on(1, pair.agents[1].messages) == [("0", b"later")]
        np.testing.assert_array_equal(pair.memory[to][half:], pair.memory[source][half:])
        assert first.state is State.ACTIVE
    finally:
        hosts.join(1, NUMBER["eth1"])
    pair.on(0, first.wait, SECONDS)
    pair.on(1, pair.agents[1].wait_for_message, SECONDS)
    np.testing.assert_array_equal(pair.memory[to], pair.memory[source])
    before = hosts.received(to, NUMBER["eth1"])
    pair.on(0, later.start)
    pair.on(0, later.wait, SECONDS)
    assert hosts.received(to, NUMBER["eth1"]) - before > half // 4
    pair.close()
