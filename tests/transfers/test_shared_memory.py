"""Host memory that ProxyCCL allocated: a peer maps the memory and copies with its own CPU."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from proxyccl.channels.transfers import host_memory
from proxyccl.channels.transfers.regions import Region
from proxyccl.device.errors import ArgumentError
from proxyccl.device.memory.shared_memory import find_range
from proxyccl.transfer import Agent, DisconnectedError, NotRegisteredError, State, shared_empty, strided
from support.agents import Child, child, force_path, metadata_of

NBYTES = 4 << 20

pytestmark = [
    pytest.mark.host_only("agents move the host's memory, whatever the runtime"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


def serve_shared(connection: socket.socket) -> None:
    """Serves an agent with private memory and shared memory, both filled with 7. Each message names one of these
    memories, and the answer is the sum of this memory's bytes.
    """
    agent = Agent("b", listen=())
    memory = shared_empty(NBYTES)
    memory[:] = 7
    private = np.full(NBYTES, 7, np.uint8)
    agent.register(private)
    agent.register(memory[: NBYTES // 2])
    agent.register(memory[NBYTES // 2 :])
    connection.send(agent.metadata())
    while True:
        agent.wait_for_message(60)
        agent.messages()
        connection.send(b"%d" % int(memory.sum()))


class Shared:
    """An agent "a" of this process, and a child's agent "b" with shared memory.

    Attributes:
        near: a's region.
        private: the child's region of private memory.
        far: the child's region of shared memory.
    """

    def __init__(self, process: Child) -> None:
        self.agent = Agent("a", listen=())
        self.memory = np.zeros(NBYTES, np.uint8)
        self.near = self.agent.register(self.memory)
        self.agent.add(process.receive())
        self.private, self.far, _ = self.agent.regions_of("b")


@pytest.fixture
def process() -> Iterator[Child]:
    with child(serve_shared) as made:
        yield made


@pytest.fixture
def shared(process: Child) -> Iterator[Shared]:
    made = Shared(process)
    yield made
    made.agent.close()


def test_blocks_arrive_where_they_belong(process: Child, shared: Shared) -> None:
    read = shared.agent.prepare("read", "b", strided(shared.near.address, shared.far.address, 1001, 1000, 2000, 1500))
    assert read.path.name == "shared_memory"
    read.start().wait()
    assert int((shared.memory == 7).sum()) == 1000 * 1001
    shared.memory[:] = 1
    half = NBYTES // 2
    both = [(shared.near.address + start, shared.far.address + start, half) for start in (0, half)]
    writing = shared.agent.write("b", both, message=b"look")
    writing.wait()
    assert process.receive() == b"%d" % NBYTES
    force_path(shared.agent, "process_vm")
    assert shared.agent.prepare("read", "b", both).path.name == "process_vm"


def test_other_memory_takes_the_links_path(shared: Shared) -> None:
    row = (shared.near.address, shared.private.address, 100)
    transfer = shared.agent.prepare("read", "b", [row])
    assert transfer.path.name == "process_vm"
    mixed = shared.agent.prepare("read", "b", [row, (shared.near.address, shared.far.address, 100)])
    assert mixed.path.name == "process_vm"
    mixed.start().wait()


def test_memory_that_cannot_be_mapped_takes_the_links_path(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: bytes) -> None:
        raise ArgumentError("handle", "the test refuses")

    shared.agent.connect("b")
    monkeypatch.setattr(host_memory.SharedMemory, "open", refuse)
    with pytest.warns(RuntimeWarning, match="can't map memory of agent b: handle: the test refuses"):
        transfer = shared.agent.prepare("read", "b", [(shared.near.address, shared.far.address, 100)])
    assert transfer.path.name == "process_vm"


def test_a_peer_that_is_killed_or_removed(process: Child, shared: Shared) -> None:
    transfer = shared.agent.prepare("read", "b", [(shared.near.address, shared.far.address, NBYTES // 2)])
    transfer.start().wait()
    process.kill()
    with pytest.raises(DisconnectedError):  # noqa: PT012  the loop ends when the agent notices the peer's exit
        while True:
            transfer.start().wait()
    shared.agent.remove("b")
    assert (shared.memory[: NBYTES // 2] == 7).all()


def mapped_files() -> set[str]:
    return {line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:" in line}


def test_memory_of_a_peer_that_was_killed_is_free_although_nobody_looks(process: Child, shared: Shared) -> None:
    shared.agent.connect("b")
    before = mapped_files()
    transfer = shared.agent.read("b", [(shared.near.address, shared.far.address, 100)])
    transfer.wait()
    assert mapped_files() > before
    process.kill()
    deadline = time.monotonic() + 60
    while mapped_files() - before:  # the agent unmaps without a call, although `transfer` still exists
        assert time.monotonic() < deadline
        time.sleep(0.001)
    with pytest.raises(DisconnectedError):
        transfer.start().wait()
    with pytest.raises(DisconnectedError):
        shared.agent.read("b", [(shared.near.address, shared.far.address, 100)]).wait()


def test_memory_at_an_address_where_other_memory_was() -> None:
    """A peer's new memory often has the address of its freed memory, whose mapping the agent must not use."""
    ours, at = np.zeros(2000, np.uint8), 1 << 40
    with Agent("a", listen=()) as a, Agent("b", listen=()) as b:
        a.add(b.metadata())
        here = a.register(ours).address
        transfers, number = [], 0
        for value, nbytes in ((1, 2000), (2, 2000), (3, 1000)):
            memory = shared_empty(2000)
            memory[:] = value
            found = find_range(memory.ctypes.data, nbytes)
            assert found is not None
            share = host_memory.share_of(Region(at, nbytes), found)
            metadata, number = metadata_of(b, share.region, share, former=number)
            a.add(metadata)
            transfers.append(a.read("b", [(here, at, nbytes)]))
            transfers[-1].wait()
            assert (ours[:nbytes] == value).all()
        ours[:] = 0
        for transfer in transfers[:2]:
            with pytest.raises(NotRegisteredError):
                transfer.start().wait()
        assert not ours.any()
        # An empty region inside another region does not affect transfers of the outer region.
        a.add(metadata_of(b, Region(at + 500, 0))[0])
        assert a.prepare("read", "b", [(here, at, 1000)]).path.name == "shared_memory"
        a.add(metadata_of(b, Region(at, 500))[0])  # the new region is not memory that ProxyCCL allocated
        assert a.prepare("read", "b", [(here, at, 500)]).path.name == "process_vm"


def test_an_array() -> None:
    array = shared_empty((3, 5), np.float32)
    assert array.shape == (3, 5)
    assert array.dtype == np.float32
    assert not array.any()
    array[1] = 2
    with Agent("a", listen=()) as agent:
        region = agent.register(array)
        agent.deregister(region)
        with pytest.raises(NotRegisteredError):
            agent.deregister(region)
    with pytest.raises(ArgumentError):
        shared_empty(0)


def test_a_transfer_of_a_removed_agent_is_lost() -> None:
    memory, ours = shared_empty(NBYTES), np.zeros(NBYTES, np.uint8)
    with Agent("a", listen=()) as a, Agent("b", listen=()) as b:
        far, near = b.register(memory), a.register(ours)
        a.add(b.metadata())
        transfer = a.read("b", [(near.address, far.address, NBYTES)])
        assert transfer.path.name == "shared_memory"
        transfer.wait()
        a.remove("b")
        with pytest.raises(DisconnectedError, match="agent b: the peer was removed"):
            transfer.start().wait()
        assert transfer.state is State.LOST
