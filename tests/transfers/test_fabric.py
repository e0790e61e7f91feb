"""Agents connected by libfabric's TCP provider, on this host's loopback."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from proxyccl.channels.transfers.regions import Region
from proxyccl.device.errors import ResourceError
from proxyccl.proxy.fabric.endpoint import FabricEndpoint
from proxyccl.transfer import (
    ActiveError,
    Agent,
    CanceledError,
    DisconnectedError,
    NotRegisteredError,
    State,
    TransferError,
    TransferTimeoutError,
    strided,
)
from support.agents import add_changed, child, serve_memory
from support.packages.fabric import library_or_skip, this_library
from support.transports import needs_fabric

NBYTES = 4 << 20

pytestmark = [
    pytest.mark.host_only("agents move the host's memory, whatever the runtime"),
    needs_fabric,
    pytest.mark.filterwarnings("ignore:agent .* through a socket:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@pytest.fixture(scope="module")
def library() -> str:
    return library_or_skip()


@pytest.fixture(autouse=True)
def by_tcp(library: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes agents use libfabric's TCP provider, whatever adapters this machine has."""
    with this_library(library, monkeypatch):
        yield


class OnFabric:
    def __init__(self) -> None:
        self.a, self.b = (Agent(name, listen=["127.0.0.1"], paths=["fabric"]) for name in "ab")
        self.ours = np.zeros(NBYTES, np.uint8)
        self.theirs = np.random.default_rng(7).integers(0, 256, NBYTES, dtype=np.uint8)
        self.near, self.far = self.a.register(self.ours), self.b.register(self.theirs)
        self.a.add(self.b.metadata())

    def close(self) -> None:
        self.a.close()
        self.b.close()


@pytest.fixture
def agents() -> Iterator[OnFabric]:
    made = OnFabric()
    yield made
    made.close()


@pytest.mark.parametrize("operation", ["read", "write"])
def test_blocks_arrive_where_they_belong(agents: OnFabric, operation: str) -> None:
    """Moves more blocks, of all alignments, than requests may be outstanding, and a long block."""
    rows = strided(agents.near.address, agents.far.address, 1003, 1000, 1501, 2003)
    long = [[agents.near.address + (3 << 20), agents.far.address + (3 << 20), 1 << 20]]
    rows = np.concatenate((rows, np.array(long, np.uint64)))
    source, to = (agents.theirs, agents.ours) if operation == "read" else (agents.ours, agents.theirs)
    agents.ours[:] = np.arange(NBYTES, dtype=np.uint64).astype(np.uint8)
    wanted = to.copy()
    base = np.array([agents.near.address, agents.far.address, 0], np.uint64)
    for near, far, nbytes in (rows - base).astype(int):
        start, end = (near, far)[:: 1 if operation == "read" else -1]
        wanted[start : start + nbytes] = source[end : end + nbytes]
    transfer = agents.a.prepare(operation, "b", rows)
    assert transfer.path.name == agents.a.connect("b").name
    assert transfer.path.name.startswith("fabric (tcp")
    for _ in range(2):
        transfer.start(b"arrived").wait()
        agents.b.wait_for_message(60)
        assert agents.b.messages() == [("a", b"arrived")]
        np.testing.assert_array_equal(to, wanted)
    transfer.start()
    while not transfer.done():
        pass


@pytest.mark.parametrize("operation", ["read", "write"])
def test_local_memory_that_is_deregistered_during_a_transfer(agents: OnFabric, operation: str) -> None:
    memory = np.zeros(64 << 20, np.uint8)
    theirs = agents.b.register(np.zeros_like(memory))
    agents.a.add(agents.b.metadata())
    for _ in range(50):
        ours = agents.a.register(memory)
        transfer = agents.a.prepare(operation, "b", [(ours.address, theirs.address, memory.nbytes)]).start()
        agents.a.deregister(ours)
        if transfer.state is not State.DONE:  # otherwise the transfer ended before its memory was deregistered
            break
    with pytest.raises(NotRegisteredError, match="this agent has deregistered its memory at 0x"):
        transfer.wait()
    agents.a.read("b", [(agents.near.address, agents.far.address, NBYTES)]).wait()
    np.testing.assert_array_equal(agents.ours, agents.theirs)


def test_regions_that_follow_each_other_keep_their_keys(agents: OnFabric) -> None:
    both = np.arange(2 * 4096, dtype=np.uint64).astype(np.uint8)
    address = both.ctypes.data
    for start in (0, 4096):
        agents.b.register((address + start, 4096))
    agents.a.add(agents.b.metadata())
    rows = [(agents.near.address + start, address + start, 4096) for start in (0, 4096)]
    agents.a.read("b", rows).wait()
    np.testing.assert_array_equal(agents.ours[: 2 * 4096], both)


def test_regions_are_registered_all_or_none(agents: OnFabric, monkeypatch: pytest.MonkeyPatch) -> None:
    halves = [Region(agents.far.address + start, NBYTES // 2) for start in (0, NBYTES // 2)]
    register = FabricEndpoint.register

    def refuse_the_second(endpoint: FabricEndpoint, address: int, nbytes: int, *rest: Any) -> Any:
        if address == halves[1].address:
            raise ResourceError("the test refuses")
        return register(endpoint, address, nbytes, *rest)

    release, released = FabricEndpoint.release, []
    monkeypatch.setattr(FabricEndpoint, "register", refuse_the_second)
    monkeypatch.setattr(FabricEndpoint, "release", lambda self, made: released.append(made.ptr) or release(self, made))
    with pytest.raises(ResourceError, match="the test refuses"):
        agents.b.register_regions(halves)
    assert agents.b.regions == [agents.far]
    assert released == [halves[0].address]


def test_a_peer_without_libfabric_is_reached_by_tcp() -> None:
    with Agent("a", listen=["127.0.0.1"], paths=["fabric", "tcp"]) as a, Agent("b", listen=["127.0.0.1"]) as b:
        a.add(b.metadata())
        assert a.connect("b").name == "tcp"


def test_memory_that_is_not_registered_there_goes_by_the_socket(agents: OnFabric) -> None:
    """If the peer's metadata have no libfabric key for some memory, the transfer uses a socket."""
    add_changed(agents, keys=[])
    with pytest.warns(
        RuntimeWarning, match="through a socket: some of the peer's memory is not registered with libfabric"
    ):
        transfer = agents.a.prepare("read", "b", [(agents.near.address, agents.far.address, NBYTES)])
    assert transfer.path.name == "unix"
    transfer.start().wait()
    np.testing.assert_array_equal(agents.ours, agents.theirs)


def test_memory_that_was_registered_in_another_region_before(agents: OnFabric) -> None:
    agents.b.deregister(agents.far)
    part = agents.b.register(agents.theirs[: NBYTES // 2])
    agents.a.add(agents.b.metadata())
    transfer = agents.a.read("b", [(agents.near.address, part.address, part.nbytes)])
    transfer.wait()
    assert transfer.path.name.startswith("fabric")
    np.testing.assert_array_equal(agents.ours[: part.nbytes], agents.theirs[: part.nbytes])


def test_memory_that_was_deregistered(agents: OnFabric) -> None:
    transfer = agents.a.prepare("read", "b", [(agents.near.address, agents.far.address, NBYTES)])
    transfer.start().wait()
    agents.b.deregister(agents.far)
    with pytest.raises(NotRegisteredError, match=rf"agent b has deregistered its memory at {agents.far.address:#x}"):
        transfer.start().wait()


def test_a_peer_that_is_removed_and_comes_again(agents: OnFabric) -> None:
    for _ in range(3):
        agents.a.add(agents.b.metadata())
        agents.ours[:] = 0
        transfer = agents.a.prepare("read", "b", [(agents.near.address, agents.far.address, NBYTES)])
        transfer.start()
        agents.a.remove("b")
        agents.a.add(agents.b.metadata())
        agents.a.read("b", [(agents.near.address, agents.far.address, NBYTES)]).wait()
        np.testing.assert_array_equal(agents.ours, agents.theirs)
        agents.a.remove("b")
    agents.a.add(agents.b.metadata())


def test_a_canceled_transfer_touches_nothing_more(agents: OnFabric) -> None:
    transfer = agents.a.prepare("read", "b", [(agents.near.address, agents.far.address, NBYTES)])
    for _ in range(5):
        transfer.start(b"canceled")
        transfer.cancel()
        assert transfer.state in (State.CANCELED, State.DONE)
        agents.ours[:] = 0
        assert not agents.ours.any()


@contextlib.contextmanager
def stopped_peer() -> Iterator[tuple[Any, Agent, Any]]:
    """Yields a stopped process with agent b, an agent a of this process, and an active transfer between them."""

    def body(connection: socket.socket) -> None:
        os.environ["PROXYCCL_TRANSFER_PATHS"] = "fabric"
        serve_memory(connection)

    with child(body) as process, Agent("a", listen=["127.0.0.1"], paths=["fabric"]) as agent:
        agent.add(process.receive())
        ours, theirs = agent.register(np.zeros(NBYTES, np.uint8)), agent.regions_of("b")[0]
        transfer = agent.prepare("read", "b", [(ours.address, theirs.address, NBYTES)])
        transfer.start().wait()
        process.stop()
        transfer.start(b"never told")
        yield process, agent, transfer


def test_requests_that_are_outstanding_are_not_said_to_be_canceled() -> None:
    """libfabric's requests can't be canceled, so a canceled transfer stays active until its requests have ended."""
    with stopped_peer() as (process, _, transfer):
        for call in (transfer.cancel, transfer.close):
            with pytest.raises(ActiveError, match="still has requests outstanding"):
                call(0.05)
        assert transfer.state is State.ACTIVE
        with pytest.raises(ActiveError):
            transfer.start()
        os.kill(process.pid, signal.SIGCONT)
        with pytest.raises(CanceledError):
            transfer.wait(60)
        transfer.cancel()
        transfer.start(b"told").wait()


class EndedQueue:
    """Makes libfabric report that an agent's completion queue has ended.

    Args:
        agent: the agent with the queue.
        error: whether `fi_cq_readerr` reports the end, after an error that `fi_cq_read` has reported.
    """

    _CLOSED, _ERROR_AVAILABLE = -errno.EBADF, -259
    _FID_WORDS = 3
    _OPERATIONS, _READ, _READERR = 9, 1, 3
    """Words of `fi_ops_cq`, and the numbers of two."""

    def __init__(self, agent: Agent, *, error: bool) -> None:
        assert agent._fabric is not None
        of_queue = ctypes.c_uint64.from_address(agent._fabric.ports[0].queue + 8 * self._FID_WORDS)
        self._before = of_queue, of_queue.value
        call = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._calls = [call(lambda *_: self._ERROR_AVAILABLE if error else self._CLOSED), call(lambda *_: self._CLOSED)]
        self._operations = (ctypes.c_uint64 * self._OPERATIONS).from_buffer_copy(
            ctypes.string_at(of_queue.value, 8 * self._OPERATIONS)
        )
        for number, each in zip((self._READ, self._READERR), self._calls, strict=True):
            self._operations[number] = ctypes.cast(each, ctypes.c_void_p).value or 0
        of_queue.value = ctypes.addressof(self._operations)

    def undo(self) -> None:
        of_queue, value = self._before
        of_queue.value = value


@pytest.mark.parametrize("error", [False, True])
def test_a_queue_that_has_ended_ends_transfers(error: bool) -> None:
    with stopped_peer() as (_, agent, transfer):
        ended = EndedQueue(agent, error=error)
        with pytest.raises(TransferError, match=r"by fabric .* failed: Bad file descriptor"):
            transfer.done()
        with pytest.raises(TransferError, match=r"by fabric .* failed: Bad file descriptor"):
            transfer.start().wait(60)
        before = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - before < 0.1  # the agent's thread does not poll the closed queue
        ended.undo()


def test_an_agent_closes_although_requests_are_outstanding() -> None:
    with stopped_peer() as (_, agent, transfer):
        agent.close()
        with pytest.raises(CanceledError):
            transfer.start().wait()


def test_an_idle_agent_takes_no_time(agents: OnFabric) -> None:
    agents.a.read("b", [(agents.near.address, agents.far.address, 8)]).wait()
    gc.collect()
    before = sum(os.times()[:2])
    with pytest.raises(TransferTimeoutError):
        agents.a.wait_for_message(1.0)
    assert sum(os.times()[:2]) - before < 0.5


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_peer_that_is_killed(operation: str) -> None:
    def body(connection: socket.socket) -> None:
        os.environ["PROXYCCL_TRANSFER_PATHS"] = "fabric"
        serve_memory(connection)

    with child(body) as process, Agent("a", listen=["127.0.0.1"], paths=["fabric"]) as agent:
        agent.add(process.receive())
        ours, theirs = agent.register(np.zeros(NBYTES, np.uint8)), agent.regions_of("b")[0]
        transfer = agent.prepare(operation, "b", [(ours.address, theirs.address, NBYTES)])
        transfer.start().wait()
        process.stop()
        transfer.start()
        with pytest.raises(TransferTimeoutError):
            transfer.wait(0.05)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(DisconnectedError):
            transfer.wait(60)
        assert transfer.state is State.LOST
