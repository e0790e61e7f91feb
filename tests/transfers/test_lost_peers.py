"""How and when agents notice that a peer was killed, stopped, forked or closed."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from proxyccl.channels.transfers.losses import event_of_losses
from proxyccl.device.errors import ClosedError
from proxyccl.transfer import Agent, DisconnectedError, Region, State, Transfer, TransferTimeoutError
from support.agents import PATHS, Child, child, force_path, serve_memory

SOON = 20.0
"""Seconds: far below the time-out of a wait, and long on a busy machine."""
NBYTES = 4 << 20

pytestmark = [
    pytest.mark.host_only("agents move the host's memory, whatever the runtime"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class Initiator:
    """An agent "a" that reads from and writes to a child's memory."""

    def __init__(self, metadata: bytes) -> None:
        self.agent = Agent("a", listen=["127.0.0.1"])
        self.memory = np.zeros(NBYTES, np.uint8)
        self.region = self.agent.register(self.memory)
        self.agent.add(metadata)
        self.peer: Region = self.agent.regions_of("b")[0]

    def prepare(self, operation: str, nbytes: int = NBYTES) -> Transfer:
        return self.agent.prepare(operation, "b", [(self.region.address, self.peer.address, nbytes)])


def lost_soon(call: Callable[[], object]) -> None:
    start = time.monotonic()
    with pytest.raises(DisconnectedError):
        call()
    assert time.monotonic() - start < SOON


def ask(process: Child, command: bytes) -> bytes:
    process.connection.send(command)
    return process.receive()


def test_a_peer_killed_before_the_link_opens() -> None:
    with child(serve_memory) as process:
        initiator = Initiator(process.receive())
        process.kill()
        lost_soon(lambda: initiator.prepare("read"))
        lost_soon(lambda: initiator.agent.notify("b", b"x"))
        initiator.agent.close()


def test_an_error_while_one_agent_unmaps_memory_keeps_no_other_agent_from_it(caplog: pytest.LogCaptureFixture) -> None:
    unmapped = threading.Event()

    class Tasks:
        def fail(self) -> None:
            raise RuntimeError("broken")

        def unmap(self) -> None:
            unmapped.set()

    tasks = Tasks()
    event = event_of_losses(tasks.fail)
    event_of_losses(tasks.unmap)
    for _ in range(2):
        os.eventfd_write(event, 1)
        assert unmapped.wait(SOON)
        unmapped.clear()
    assert "broken" in caplog.text


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("how", ["killed", "closed"])
def test_a_peer_that_ends_while_the_link_is_idle(path: str, how: str) -> None:
    with child(serve_memory) as process:
        initiator = Initiator(process.receive())
        force_path(initiator.agent, path)
        read, write, done = initiator.prepare("read"), initiator.prepare("write"), initiator.prepare("read", 100)
        done.start().wait()
        assert done.path.name == path
        assert (initiator.memory[:100] == 7).all()
        if how == "killed":
            process.kill()
        else:
            ask(process, b"close")
        lost_soon(lambda: _until_lost(read))
        lost_soon(lambda: write.start().wait())
        assert done.done()
        with pytest.raises(DisconnectedError):  # noqa: PT012  the loop calls until the error is raised
            while True:
                initiator.agent.notify("b", b"x")
        initiator.agent.close()


@pytest.mark.parametrize("path", PATHS[1:])
@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_peer_killed_in_the_middle(path: str, operation: str) -> None:
    with child(serve_memory) as process:
        initiator = Initiator(process.receive())
        force_path(initiator.agent, path)
        initiator.prepare("read", 100).start().wait()
        process.stop()  # a stopped peer keeps the transfer active
        transfer = initiator.prepare(operation).start()
        with pytest.raises(TransferTimeoutError):
            transfer.wait(0.05)
        initiator.agent.notify("b", b"waits too")
        process.kill()
        lost_soon(transfer.wait)
        assert transfer.state is State.LOST
        initiator.agent.close()


def test_a_stopped_peer_holds_up_neither_cancel_nor_other_peers() -> None:
    with child(serve_memory) as process:
        initiator = Initiator(process.receive())
        other = Agent("c", listen=())
        region = other.register(np.full(NBYTES, 3, np.uint8))
        initiator.agent.add(other.metadata())
        force_path(initiator.agent, "unix")
        half = NBYTES // 2
        blocks = [(initiator.region.address + half, initiator.peer.address + half, half)]
        transfers = [initiator.prepare("read"), initiator.agent.prepare("write", "b", blocks)]
        process.stop()
        for transfer in transfers:
            transfer.start()
        initiator.agent.read("c", [(initiator.region.address, region.address, NBYTES)]).wait()
        for transfer in transfers:
            transfer.close()
        os.kill(process.pid, signal.SIGCONT)  # data that the peer sends for the closed transfers is dropped
        initiator.prepare("read", 100).start(b"x").wait()
        assert (initiator.memory[:100] == 7).all()
        assert (initiator.memory[100:] == 3).all()
        for agent in (other, initiator.agent):
            agent.close()


@pytest.mark.parametrize("path", ["process_vm", "tcp"])
def test_a_fork_of_the_peer_does_not_hide_its_end(path: str) -> None:
    with child(serve_memory) as process:
        initiator = Initiator(process.receive())
        force_path(initiator.agent, path)
        transfer = initiator.prepare("read", 100)
        transfer.start().wait()
        process.connection.send(b"fork")
        assert {process.receive(), process.receive()} == {b"forked", b"done"}
        process.kill()
        lost_soon(lambda: _until_lost(transfer))
        initiator.agent.close()


def _until_lost(transfer: Transfer) -> None:
    while True:
        transfer.start().wait()


def test_a_fork_of_this_process_must_make_its_own_agent() -> None:
    agent = Agent("a", listen=())
    region = agent.register(np.zeros(10, np.uint8))
    transfer = agent.read("a", [(region.address, region.address, 10)])

    def body(connection: socket.socket) -> None:
        for call in (agent.metadata, transfer.start, agent.messages, transfer.close, agent.close):
            try:
                call()
            except ClosedError as error:
                connection.send(str(error).encode())
        with Agent("own", listen=()) as own:
            own.notify("own", b"works")
            connection.send(own.messages()[0][1])

    with child(body) as process:
        refusals = [process.receive() for _ in range(5)]
        assert all(b"is a fork of it and must make its own" in refusal for refusal in refusals)
        assert process.receive() == b"works"
    transfer.start().wait()
    agent.close()


def test_agents_come_and_go() -> None:
    with Agent("a", listen=()) as agent:
        memory = np.zeros(100, np.uint8)
        region = agent.register(memory)
        before = len(os.listdir("/proc/self/fd"))
        for number in range(9):  # a third of the children is killed, a third closes the agent, a third only exits
            with child(lambda connection, number=number: serve_memory(connection, 100, number)) as process:  # type: ignore[misc]
                name = agent.add(process.receive())
                agent.read(name, [(region.address, agent.regions_of(name)[0].address, 100)], message=b"read").wait()
                assert (memory == number).all()
                if number % 3 == 0:
                    process.kill()
                elif number % 3 == 1:
                    ask(process, b"close")
            agent.remove(name)
        deadline = time.monotonic() + SOON
        while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
            time.sleep(0.001)
        assert len(os.listdir("/proc/self/fd")) == before
