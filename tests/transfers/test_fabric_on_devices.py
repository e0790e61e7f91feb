"""Memory of devices between hosts by libfabric: by the adapter where it reaches that memory, else staged.

The agents are on this host, but each takes the other for one of another host. The provider is libfabric's TCP, which
reaches the memory of the host runtime's devices and not that of GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from proxyccl.channels.transfers import agent as agents
from proxyccl.channels.transfers import fabric, paths
from proxyccl.device.arrays.array import Array
from proxyccl.device.arrays.dtypes import as_dtype
from proxyccl.device.errors import RuntimeUnavailableError
from proxyccl.proxy import _engine
from proxyccl.proxy.fabric.endpoint import FabricEndpoint
from proxyccl.transfer import Agent, NotRegisteredError, State, strided
from support.devices import ON_HOST, rank_runtime
from support.packages.fabric import library_or_skip

NBYTES = 3 << 20
KINDS = [("device", "device"), ("device", "host"), ("host", "device")]
STAGED = {
    ("device", "device"): "copy engine, tcp and copy engine, staged",
    ("device", "host"): "copy engine and tcp, staged",
    ("host", "device"): "tcp and copy engine, staged",
}

pytestmark = pytest.mark.skipif(not _engine.lib.proxyccl_fabric_built(), reason="this build has no fabric transport")


@pytest.fixture(scope="module")
def library() -> str:
    return library_or_skip()


@pytest.fixture(autouse=True)
def between_hosts(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_LIBFABRIC", library)
    monkeypatch.setenv("PROXYCCL_FABRIC_PROVIDER", "tcp")
    monkeypatch.setenv("PROXYCCL_FABRIC_INTERFACE", "=lo")
    monkeypatch.setattr(paths, "boot_id", lambda: "another host")


class TwoHosts:
    """Agents a and b, with memory of a device and of the host each."""

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
    made = TwoHosts()
    yield made
    made.close()


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


def test_memory_that_the_adapter_does_not_reach_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning says why."""
    if ON_HOST:
        register = FabricEndpoint.register

        def refuse(self: FabricEndpoint, ptr: int, nbytes: int, **arguments: object) -> object:
            if nbytes == NBYTES:
                raise RuntimeUnavailableError("tcp does not reach memory of fake GPUs")
            return register(self, ptr, nbytes)

        monkeypatch.setattr(FabricEndpoint, "register", refuse)
        monkeypatch.setattr(fabric, "DRAM", "all kinds are refused")
    two = TwoHosts()
    near, far = two.regions["device"][0], two.regions["device"][1]
    with pytest.warns(RuntimeWarning, match="stages memory of devices through a socket: .* does not reach memory of"):
        transfer = two.a.prepare("read", "b", [(near.address, far.address, NBYTES)])
    assert transfer.path.name == STAGED["device", "device"]
    assert "does not reach memory of" in transfer.path.reason
    transfer.start().wait()
    np.testing.assert_array_equal(two.numpy("device", 0), two.numpy("device", 1))
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
    """Two hosts with adapters go by TCP, and are told why."""
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(fabric, "_ADAPTERS", tmp_path)
    with Agent("a", listen=["127.0.0.1"]) as a, Agent("b", listen=["127.0.0.1"]) as b:
        a.add(b.metadata())
        monkeypatch.setattr(agents, "boot_id", lambda: "another host")
        with pytest.warns(RuntimeWarning, match="nothing better than its provider tcp"):
            assert a.connect("b").name == "tcp"
