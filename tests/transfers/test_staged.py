"""Device memory through a socket, as between hosts: each device copies between its memory and pinned memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from proxyccl.channels.transfers import device_memory
from proxyccl.device.arrays.array import Array
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.transfer import (
    Agent,
    DisconnectedError,
    NoPathError,
    NotRegisteredError,
    State,
    Transfer,
    TransferTimeoutError,
    strided,
)
from support.agents import force_path
from support.devices import rank_runtime
from support.paths import PROGRAMS, TESTS

NBYTES = 6 << 20
KINDS = [("device", "device"), ("device", "host"), ("host", "device")]

pytestmark = pytest.mark.filterwarnings("ignore:agent .* through a socket:RuntimeWarning")


class TwoHosts:
    """Agents a and b, connected by TCP, each with an array on its own device and one in host memory.

    Attributes:
        arrays, hosts: the device arrays, and the numpy arrays, of a and b.
        regions: for each kind of memory, the regions of a and of b.
    """

    def __init__(self) -> None:
        self.a, self.b = (Agent(name, listen=["127.0.0.1"]) for name in "ab")
        random = np.random.default_rng(11)
        runtimes = [rank_runtime(number) for number in range(2)]
        self.arrays = [Array(each, each.allocate(NBYTES), (NBYTES,), as_dtype("uint8")) for each in runtimes]
        self.hosts = [random.integers(0, 256, NBYTES, dtype=np.uint8) for _ in range(2)]
        for array in self.arrays:
            array.upload(random.integers(0, 256, NBYTES, dtype=np.uint8))
        agents = (self.a, self.b)
        self.regions = {
            "device": [agent.register(array) for agent, array in zip(agents, self.arrays, strict=True)],
            "host": [agent.register(host) for agent, host in zip(agents, self.hosts, strict=True)],
        }
        force_path(self.a, "tcp")
        self.a.add(self.b.metadata())

    def contents(self, kind: str, side: int) -> Any:
        return self.arrays[side].numpy() if kind == "device" else self.hosts[side].copy()

    def whole(self, operation: str, kinds: tuple[str, str]) -> Transfer:
        here, there = (self.regions[kind][side].address for side, kind in enumerate(kinds))
        return self.a.prepare(operation, "b", [(here, there, NBYTES)])

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    made = TwoHosts()
    yield made
    made.close()


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("kinds", KINDS, ids="-".join)
def test_blocks_arrive_where_they_belong(hosts: TwoHosts, operation: str, kinds: tuple[str, str]) -> None:
    random = np.random.default_rng(3)
    starts = np.arange(0, NBYTES // 2 - 4099, 4099, dtype=np.uint64)
    rows = np.stack((starts, random.permutation(starts), random.integers(0, 4099, len(starts))), 1).astype(np.uint64)
    rows = np.concatenate((rows, [[NBYTES // 2, NBYTES // 2, NBYTES // 2]])).astype(np.uint64)
    to = 0 if operation == "read" else 1
    wanted, source = hosts.contents(kinds[to], to), hosts.contents(kinds[1 - to], 1 - to)
    for row in rows.astype(int):
        wanted[row[to] : row[to] + row[2]] = source[row[1 - to] : row[1 - to] + row[2]]
    base = [*(hosts.regions[kind][side].address for side, kind in enumerate(kinds)), 0]
    transfer = hosts.a.prepare(operation, "b", rows + np.array(base, np.uint64))
    for _ in range(2):
        transfer.start(b"arrived").wait()
        hosts.b.wait_for_message(60)
        assert hosts.b.messages() == [("a", b"arrived")]
        np.testing.assert_array_equal(hosts.contents(kinds[to], to), wanted)
    steps = ["copy engine"] * (kinds[0] == "device") + ["tcp"] + ["copy engine"] * (kinds[1] == "device")
    assert transfer.path.name == f"{', '.join(steps[:-1])} and {steps[-1]}, staged"


def test_a_caller_that_asks_and_many_at_once(hosts: TwoHosts) -> None:
    """Concurrent transfers in both directions, some of host memory, need more than the available staging buffers."""
    size = NBYTES // 8
    here, there = (region.address for region in hosts.regions["device"])
    plain = [region.address for region in hosts.regions["host"]]
    before = hosts.contents("device", 1)
    writes = [hosts.a.prepare("write", "b", [(here + i * size, there + i * size, size)]) for i in range(4)]
    reads = [hosts.a.prepare("read", "b", [(here + i * size, there + i * size, size)]) for i in range(4, 8)]
    mixed = hosts.a.prepare("read", "b", [(plain[0], plain[1], NBYTES)])
    for transfer in (*writes, *reads, mixed):
        transfer.start()
    while not all(transfer.done() for transfer in (*writes, *reads, mixed)):
        pass
    half = NBYTES // 2
    np.testing.assert_array_equal(hosts.contents("device", 1)[:half], hosts.contents("device", 0)[:half])
    np.testing.assert_array_equal(hosts.contents("device", 0)[half:], before[half:])
    np.testing.assert_array_equal(hosts.hosts[0], hosts.hosts[1])


def test_on_a_stream(hosts: TwoHosts) -> None:
    runtime = hosts.arrays[0].runtime
    stream = runtime.create_stream()
    transfer = hosts.whole("write", ("device", "device"))
    for value in range(1, 4):
        runtime.fill(hosts.arrays[0].ptr, value, NBYTES, stream)
        transfer.start(stream=stream)
        runtime.fill(hosts.arrays[0].ptr, 0, NBYTES, stream)
        transfer.wait()
        assert (hosts.contents("device", 1) == value).all()
    stream.synchronize()


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_canceled_transfer_touches_nothing_more(hosts: TwoHosts, operation: str) -> None:
    transfer = hosts.whole(operation, ("device", "device"))
    for _ in range(10):
        transfer.start(b"canceled")
        transfer.cancel()
        assert transfer.state in (State.CANCELED, State.DONE)
        hosts.arrays[0].fill(0)
        assert not hosts.arrays[0].numpy().any()
    transfer.start().wait()
    np.testing.assert_array_equal(hosts.contents("device", 0), hosts.contents("device", 1))


@pytest.mark.parametrize("operation", ["read", "write"])
def test_memory_that_was_deregistered(hosts: TwoHosts, operation: str) -> None:
    transfer = hosts.whole(operation, ("device", "device"))
    region = hosts.regions["device"][1]
    hosts.b.deregister(region)
    with pytest.raises(NotRegisteredError, match="agent b has deregistered its memory at 0x"):
        transfer.start().wait()
    hosts.b.register(hosts.arrays[1])
    hosts.a.add(hosts.b.metadata())
    hosts.whole(operation, ("device", "device")).start().wait()
    np.testing.assert_array_equal(hosts.contents("device", 0), hosts.contents("device", 1))


@pytest.mark.parametrize("operation", ["read", "write"])
def test_local_memory_that_is_deregistered_during_a_transfer(hosts: TwoHosts, operation: str) -> None:
    for _ in range(50):
        transfer = hosts.whole(operation, ("device", "device")).start()
        hosts.a.deregister(hosts.regions["device"][0])
        if transfer.state is not State.DONE:
            break
        hosts.a.register(hosts.arrays[0])  # the transfer ended before its memory was deregistered
    with pytest.raises(NotRegisteredError, match="this agent has deregistered its memory at 0x"):
        transfer.wait()


@pytest.mark.parametrize("how", ["mapped", "reached"])
def test_within_a_host_a_socket_serves_where_memory_cannot_be(
    hosts: TwoHosts, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def refuse(*_: object) -> None:
        raise NoPathError("the test maps nothing")

    owner, name = (device_memory.Reached, "map") if how == "mapped" else (device_memory.Devices, "nearest")
    monkeypatch.setattr(owner, name, refuse)
    force_path(hosts.a, "process_vm")
    with pytest.warns(RuntimeWarning, match="stages memory of devices through a socket: .*the test maps nothing"):
        transfer = hosts.whole("read", ("host", "device"))
    assert transfer.path.name == "unix and copy engine, staged"
    transfer.start().wait()
    np.testing.assert_array_equal(hosts.hosts[0], hosts.contents("device", 1))


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_peer_that_is_killed(hosts: TwoHosts, operation: str) -> None:
    command = [sys.executable, str(PROGRAMS / "device_agent.py"), str(NBYTES), "allocated"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            peer = hosts.a.add(bytes.fromhex(process.stdout.readline().decode()))
            theirs = hosts.a.regions_of(peer)[0].address
            here = hosts.regions["device"][0].address
            many = hosts.a.prepare(operation, peer, strided(here, theirs, 1000, 3000, 2000))
            many.start().wait()
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            many.start()
            with pytest.raises(TransferTimeoutError):
                many.wait(0.05)
        finally:
            process.kill()
        with pytest.raises(DisconnectedError):
            many.wait(60)
        assert many.state is State.LOST
