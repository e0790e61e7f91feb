"""Device memory between hosts by libfabric: the adapter accesses device memory if it can, else pinned memory.

Both agents are on this host, but each believes that the other is on another host. libfabric's TCP provider can access
the memory of the host runtime's devices, but not of GPUs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from proxyccl.channels.transfers import agent as agents
from proxyccl.channels.transfers import fabric, paths
from proxyccl.device.arrays.array import Array
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.errors import RuntimeUnavailableError
from proxyccl.proxy.fabric.endpoint import FabricEndpoint
from proxyccl.transfer import (
    ActiveError,
    Agent,
    CanceledError,
    DisconnectedError,
    NotRegisteredError,
    State,
    TransferTimeoutError,
    strided,
)
from support.devices import ON_HOST, rank_runtime
from support.packages.fabric import environment, library_or_skip, this_library
from support.paths import PROGRAMS, TESTS
from support.transports import needs_fabric

NBYTES = 3 << 20
KINDS = [("device", "device"), ("device", "host"), ("host", "device")]
STAGED = {
    ("device", "device"): "copy engine, fabric (tcp;ofi_rxm) and copy engine, staged",
    ("device", "host"): "copy engine and fabric (tcp;ofi_rxm), staged",
    ("host", "device"): "fabric (tcp;ofi_rxm) and copy engine, staged",
}

pytestmark = needs_fabric


@pytest.fixture(scope="module")
def library() -> str:
    return library_or_skip()


@pytest.fixture(autouse=True)
def between_hosts(library: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(paths, "boot_id", lambda: "another host")
    with this_library(library, monkeypatch):
        yield


class TwoHosts:
    """Agents a and b, each with an array on its own device and one in host memory."""

    def __init__(self) -> None:
        self.a, self.b = (Agent(name, listen=["127.0.0.1"], paths=["fabric", "tcp"]) for name in "ab")
        random = np.random.default_rng(11)
        runtimes = [rank_runtime(number) for number in range(2)]
        self.arrays = {
            "device": [Array(each, each.allocate(NBYTES), (NBYTES,), as_dtype("uint8")) for each in runtimes],
            "host": [random.integers(0, 256, NBYTES, dtype=np.uint8) for _ in range(2)],
        }
        for array in self.arrays["device"]:
            array.upload(random.integers(0, 256, NBYTES, dtype=np.uint8))
        self.regions = {
            kind: [agent.register(array) for agent, array in zip((self.a, self.b), made, strict=True)]
            for kind, made in self.arrays.items()
        }
        self.a.add(self.b.metadata())

    def numpy(self, kind: str, side: int) -> np.ndarray:
        array = self.arrays[kind][side]
        return array.copy() if isinstance(array, np.ndarray) else array.numpy()

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture
def two() -> Iterator[TwoHosts]:
    with contextlib.closing(TwoHosts()) as made:
        yield made


@pytest.mark.filterwarnings("ignore:agent .* through a socket:RuntimeWarning")
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("kinds", KINDS)
def test_blocks_arrive_where_they_belong(two: TwoHosts, operation: str, kinds: tuple[str, str]) -> None:
    near, far = two.regions[kinds[0]][0], two.regions[kinds[1]][1]
    rows = strided(near.address, far.address, 1003, 600, 1501, 2003)
    before = [two.numpy(kind, side) for side, kind in enumerate(kinds)]
    to = 0 if operation == "read" else 1
    for row in (rows - np.array([near.address, far.address, 0], np.uint64)).astype(int):
        before[to][row[to] : row[to] + row[2]] = before[1 - to][row[1 - to] : row[1 - to] + row[2]]
    transfer = two.a.prepare(operation, "b", rows)
    assert transfer.path.name == ("fabric (tcp;ofi_rxm, device memory)" if ON_HOST else STAGED[kinds])
    for _ in range(2):
        transfer.start(b"arrived").wait()
        two.b.wait_for_message(60)
        assert two.b.messages() == [("a", b"arrived")]
        np.testing.assert_array_equal(two.numpy(kinds[to], to), before[to])


@pytest.fixture
def unreached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes registration of the host runtime's device memory fail, as if adapters could not access it. Promises that
    all devices order writes, because otherwise libfabric is not asked to register the memory of AMD GPUs.
    """
    monkeypatch.setenv("PROXYCCL_FABRIC", os.environ["PROXYCCL_FABRIC"] + ",gpu_writes=ordered")

    def refuse(*_: object) -> None:
        raise RuntimeUnavailableError("tcp does not reach memory of these GPUs")

    if ON_HOST:
        monkeypatch.setattr(FabricEndpoint, "register_of", refuse)


@pytest.mark.usefixtures("unreached")
@pytest.mark.filterwarnings("ignore:agent .* stages memory of devices through:RuntimeWarning")
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("kinds", KINDS)
def test_memory_that_the_adapter_does_not_reach_is_staged(operation: str, kinds: tuple[str, str]) -> None:
    """Moves short blocks of all alignments, and one long block."""
    two = TwoHosts()
    near, far = two.regions[kinds[0]][0], two.regions[kinds[1]][1]
    rows = strided(near.address, far.address, 1003, 600, 1501, 2003)
    long = [[near.address + (2 << 20), far.address + (2 << 20), 1 << 20]]
    rows = np.concatenate((rows, np.array(long, np.uint64)))
    before = [two.numpy(kind, side) for side, kind in enumerate(kinds)]
    to = 0 if operation == "read" else 1
    for row in (rows - np.array([near.address, far.address, 0], np.uint64)).astype(int):
        before[to][row[to] : row[to] + row[2]] = before[1 - to][row[1 - to] : row[1 - to] + row[2]]
    transfer = two.a.prepare(operation, "b", rows)
    assert transfer.path.name == STAGED[kinds]
    assert "does not reach memory of" in transfer.path.reason
    for _ in range(3):
        transfer.start(b"arrived").wait()
        two.b.wait_for_message(60)
        assert two.b.messages() == [("a", b"arrived")]
        np.testing.assert_array_equal(two.numpy(kinds[to], to), before[to])
    two.close()


@pytest.mark.usefixtures("unreached")
@pytest.mark.parametrize("kind", ["device", "host"])
def test_staged_transfers_that_end_otherwise(kind: str) -> None:
    """Staged transfers may be canceled, run concurrently or be refused. A warning says why transfers are staged."""
    two = TwoHosts()
    near, far = two.regions["device"][0], two.regions[kind][1]
    with pytest.warns(RuntimeWarning, match="through pinned memory: .* does not reach memory of"):
        transfers = [two.a.prepare("read", "b", [(near.address, far.address, NBYTES)]) for _ in range(3)]
    writing = two.a.prepare("write", "b", [(near.address, far.address, NBYTES)])
    for _ in range(3):
        for transfer in transfers:
            transfer.start()
        for transfer in transfers[1:]:
            transfer.cancel()
            assert transfer.state in (State.CANCELED, State.DONE)
        transfers[0].wait()
        np.testing.assert_array_equal(two.numpy("device", 0), two.numpy(kind, 1))
        writing.start()
        writing.cancel()
        assert writing.state in (State.CANCELED, State.DONE)
    for transfer in transfers:
        transfer.start()
    while not all(transfer.done() for transfer in transfers):
        pass
    two.b.deregister(far)
    for transfer in (transfers[0], writing):
        with pytest.raises(NotRegisteredError, match="agent b has deregistered its memory at"):
            transfer.start().wait()
    writing.start()
    two.b.close()
    with pytest.raises((DisconnectedError, NotRegisteredError)):
        writing.wait()
    two.close()


@pytest.mark.usefixtures("unreached")
@pytest.mark.filterwarnings("ignore:agent .* stages memory of devices through:RuntimeWarning")
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("kind", ["device", "host"])
def test_a_peer_that_stops_and_is_killed(kind: str, operation: str) -> None:
    """A stopped peer may still move staged data, so cancel() raises an error until the peer is killed."""
    two = TwoHosts()
    path = os.pathsep.join((str(TESTS), os.environ.get("PYTHONPATH", "")))
    env = {**os.environ, **environment(), "PYTHONPATH": path, "PROXYCCL_TRANSFER_PATHS": "fabric,tcp"}
    command = [sys.executable, str(PROGRAMS / "device_agent.py"), str(NBYTES), "allocated"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            peer = two.a.add(bytes.fromhex(process.stdout.readline().decode()))
            far = next(each for each in two.a.regions_of(peer) if (each.kind == "dram") == (kind == "host"))
            rows = [(two.regions["device"][0].address, far.address, min(NBYTES, far.nbytes))]
            transfers = [two.a.prepare(operation, peer, rows) for _ in range(2)]
            for transfer in transfers:
                assert transfer.path.name == STAGED["device", kind]
                transfer.start().wait()
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            for transfer in transfers:
                transfer.start()
                with pytest.raises(TransferTimeoutError):
                    transfer.wait(0.1)  # long enough to send the transfer's requests
            with pytest.raises(ActiveError, match="still has requests outstanding"):
                transfers[1].cancel(0.05)
            assert transfers[0].state is State.ACTIVE
        finally:
            process.kill()
        with pytest.raises(DisconnectedError):
            transfers[0].wait(60)
        with pytest.raises(CanceledError):
            transfers[1].wait(60)
    two.close()


@pytest.mark.host_only("libfabric's TCP reaches no memory of GPUs")
def test_memory_that_was_deregistered(two: TwoHosts) -> None:
    near, far = two.regions["device"][0], two.regions["device"][1]
    transfer = two.a.prepare("write", "b", [(near.address, far.address, NBYTES)])
    transfer.start().wait()
    two.b.deregister(far)
    with pytest.raises(NotRegisteredError, match=rf"agent b has deregistered its memory at {far.address:#x}"):
        transfer.start().wait()
    transfer.start()
    transfer.cancel()
    assert transfer.state in (State.CANCELED, State.REFUSED)


@pytest.mark.host_only("libfabric's TCP reaches no memory of GPUs")
def test_on_a_stream(two: TwoHosts) -> None:
    near, far = two.regions["device"][0], two.regions["device"][1]
    stream = two.arrays["device"][0].runtime.create_stream()
    transfer = two.a.prepare("read", "b", [(near.address, far.address, NBYTES)])
    transfer.start(stream=stream)
    stream.synchronize()
    np.testing.assert_array_equal(two.numpy("device", 0), two.numpy("device", 1))


def test_adapters_that_libfabric_does_not_serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(fabric, "_ADAPTERS", tmp_path)
    with Agent("a", listen=["127.0.0.1"]) as a, Agent("b", listen=["127.0.0.1"]) as b:
        a.add(b.metadata())
        monkeypatch.setattr(agents, "boot_id", lambda: "another host")
        with pytest.warns(RuntimeWarning, match="nothing better than its provider tcp"):
            assert a.connect("b").name == "tcp"
