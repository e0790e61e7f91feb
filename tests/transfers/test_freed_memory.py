"""The errors of both agents when an owner frees or deregisters memory that a peer's transfers still use."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from proxyccl.transfer import (
    Agent,
    CanceledError,
    DisconnectedError,
    FreedMemoryError,
    NotRegisteredError,
    Region,
    State,
    TransferError,
    shared_empty,
)
from support.agents import MAPPED_BYTES, Mapped, Pair, child, force_path, serve_memory
from support.paths import ROOT

NBYTES = MAPPED_BYTES
pytestmark = [
    pytest.mark.host_only("agents move the host's memory, whatever the runtime"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@contextlib.contextmanager
def with_mapped(pair: Pair, mapped: Mapped) -> Iterator[Region]:
    """Registers memory with b, and gives b's metadata to a. Yields the region, and deregisters it after the block."""
    region = pair.b.register((mapped.address, NBYTES))
    pair.a.add(pair.b.metadata())
    yield region
    if region in pair.b.regions:
        pair.b.deregister(region)


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("nbytes", [1 << 16, NBYTES])
def test_a_peer_that_freed_its_memory(pair: Pair, mapped: Mapped, operation: str, nbytes: int) -> None:
    """process_vm copies in the caller's thread, and for long transfers also in the agent's thread."""
    ours = pair.a.register(np.zeros(NBYTES, np.uint8))
    with with_mapped(pair, mapped) as region:
        transfer = pair.a.prepare(operation, "b", [(ours.address, region.address, nbytes)])
        transfer.start().wait()
        mapped.free()
        with pytest.raises(FreedMemoryError, match=rf"agent b has freed its memory at {region.address:#x} ") as caught:
            transfer.start(b"never told").wait()
        assert caught.value.peer == "b"
        assert transfer.state is State.FAILED
        pair.b.deregister(region)
        with pytest.raises(NotRegisteredError, match=rf"agent b has deregistered its memory at {region.address:#x}"):
            transfer.start(b"never told").wait()
        assert transfer.state is State.REFUSED
    pair.a.prepare(operation, "b", pair.whole()).start(b"the link goes on").wait()
    pair.b.wait_for_message(60)
    assert pair.b.messages() == [("a", b"the link goes on")]


def test_the_address_is_the_first_that_could_not_be_copied(pair: Pair, mapped: Mapped) -> None:
    ours = pair.a.register(np.zeros(NBYTES, np.uint8))
    with with_mapped(pair, mapped) as region:
        mapped.free(3 << 20)
        blocks = [(ours.address, region.address + (1 << 16), 1 << 18), (ours.address, region.address, NBYTES)]
        with pytest.raises(FreedMemoryError, match=f"{region.address + (3 << 20):#x}"):
            pair.a.read("b", blocks).wait()


@pytest.mark.parametrize("path", ["unix", "tcp"])
def test_a_socket_to_a_peer_that_freed_its_memory(pair: Pair, mapped: Mapped, path: str) -> None:
    ours = pair.a.register(np.zeros(NBYTES, np.uint8))
    force_path(pair.a, path)
    with with_mapped(pair, mapped) as region:
        mapped.free()
        for nbytes in (100, 1 << 18, NBYTES):
            rows = [(ours.address, region.address, nbytes)]
            for operation in ("read", "write"):
                with pytest.raises(FreedMemoryError, match=rf"agent b has freed its memory at {region.address:#x} "):
                    pair.a.prepare(operation, "b", rows).start(b"never told").wait()
        pair.b.deregister(region)
        blocks = [*pair.blocks((0, 0, 100)).tolist(), (ours.address, region.address, 100)]
        for operation in ("read", "write"):
            with pytest.raises(NotRegisteredError, match=f"remote address {region.address:#x} are not registered"):
                pair.a.prepare(operation, "b", blocks)
    pair.a.prepare("write", "b", pair.whole()).start(b"the link goes on").wait()
    pair.b.wait_for_message(60)
    assert pair.b.messages() == [("a", b"the link goes on")]


@pytest.mark.parametrize("path", ["unix", "tcp"])
@pytest.mark.parametrize("freed", [0, 2, 11])
def test_a_socket_and_a_block_of_many_that_was_freed(pair: Pair, mapped: Mapped, path: str, freed: int) -> None:
    """"""
    force_path(pair.a, path)
    nbytes = 1 << 16  # a frame has room for eight blocks
    with with_mapped(pair, mapped) as region:
        mapped.punch(freed * nbytes, nbytes)
        blocks = [(pair.our_region.address, region.address + block * nbytes, nbytes) for block in range(16)]
        with pytest.raises(FreedMemoryError, match=f"agent b has freed its memory at {blocks[freed][1]:#x} "):
            pair.a.read("b", blocks).wait()


@pytest.mark.parametrize("path", ["unix", "tcp"])
def test_a_socket_and_blocks_before_one_that_was_freed(pair: Pair, mapped: Mapped, path: str) -> None:
    """Two small blocks are sent in one frame with their request. The last block extends into freed memory."""
    force_path(pair.a, path)
    with with_mapped(pair, mapped) as region:
        mapped.free(1 << 16)
        near = pair.our_region.address
        pair.ours[:] = 7
        blocks = [(near, region.address, 1000), (near + 5000, region.address + (1 << 16) - 1000, 2000)]
        with pytest.raises(FreedMemoryError, match=f"{region.address + (1 << 16) - 1000:#x}"):
            pair.a.write("b", blocks).wait()
        assert ctypes.string_at(region.address, 1001) == bytes([7] * 1000 + [0])


@pytest.mark.parametrize("path", ["unix", "tcp"])
@pytest.mark.parametrize("nbytes", [100, 1 << 18])
def test_a_socket_and_memory_of_this_agent(pair: Pair, mapped: Mapped, path: str, nbytes: int) -> None:
    force_path(pair.a, path)
    ours = pair.a.register((mapped.address, NBYTES))
    mapped.free()
    with pytest.raises(FreedMemoryError, match=rf"this agent's memory at {ours.address:#x} was freed"):
        pair.a.read("b", [(ours.address, pair.their_region.address, nbytes)]).wait()
    pair.a.read("b", pair.whole()).wait()
    np.testing.assert_array_equal(pair.ours, pair.theirs)


@pytest.mark.parametrize("path", ["self", "shared_memory", "process_vm", "unix", "tcp"])
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("nbytes", [100, NBYTES])
@pytest.mark.parametrize("harm", ["free", "protect", "truncate"])
def test_memory_of_this_agent(mapped: Mapped, path: str, operation: str, nbytes: int, harm: str) -> None:
    only = None if path == "self" else [path, "process_vm"] if path == "shared_memory" else [path]
    with Agent("a", paths=only) as a, Agent("b", listen=["127.0.0.1"]) as b:
        theirs = shared_empty(NBYTES) if path == "shared_memory" else np.empty(NBYTES, np.uint8)
        theirs[:] = 7
        peer, near = ("a", a) if path == "self" else ("b", b)
        there, ours = near.register(theirs), a.register((mapped.address, NBYTES))
        other = np.zeros(100, np.uint8)
        another = a.register(other)
        if path != "self":
            a.add(b.metadata())
        transfer = a.prepare(operation, peer, [(ours.address, there.address, nbytes)])
        assert transfer.path.name == path
        transfer.start().wait()
        getattr(mapped, harm)()
        if harm == "protect" and operation == "write":
            transfer.start().wait()
        elif harm == "free":
            with pytest.raises(FreedMemoryError, match=rf"this agent's memory at {ours.address:#x} was freed"):
                transfer.start().wait()
        else:
            with pytest.raises(TransferError, match="or this agent's, although it is mapped"):
                transfer.start().wait()
        a.read(peer, [(another.address, there.address + NBYTES - 100, 100)]).wait()
        assert (other == theirs[-100:]).all()


@pytest.mark.parametrize("path", ["unix", "tcp"])
@pytest.mark.parametrize("hole", [(0, NBYTES), (1 << 18, 1 << 16), (1 << 20, 4096)])
@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("side", ["here", "there"])
def test_a_socket_and_a_hole(
    pair: Pair, mapped: Mapped, path: str, hole: tuple[int, int], operation: str, side: str
) -> None:
    """The kernel reaches the freed memory after part of a frame has been sent. Other transfers must continue."""
    force_path(pair.a, path)
    far, others = np.zeros(NBYTES, np.uint8), pair.a.prepare("read", "b", pair.whole())
    ours = pair.a.register((mapped.address, NBYTES) if side == "here" else far)
    theirs = pair.b.register(far if side == "here" else (mapped.address, NBYTES))
    pair.a.add(pair.b.metadata())
    transfer = pair.a.prepare(operation, "b", [(ours.address, theirs.address, NBYTES)])
    transfer.start().wait()
    mapped.punch(*hole)
    others.start()
    owner = "this agent's memory" if side == "here" else "agent b has freed its memory"
    with pytest.raises(FreedMemoryError, match=owner):
        transfer.start().wait()
    others.wait()
    np.testing.assert_array_equal(pair.ours, pair.theirs)


@pytest.mark.parametrize("end", ["wait", "cancel"])
def test_a_write_whose_memory_is_freed_when_a_part_was_sent(mapped: Mapped, end: str) -> None:
    with child(serve_memory) as process, Agent("a", paths=["unix"]) as agent:
        agent.add(process.receive())
        theirs, ours = agent.regions_of("b")[0], agent.register((mapped.address, NBYTES))
        memory = np.zeros(100, np.uint8)
        another = agent.register(memory)
        agent.connect("b")
        process.stop()
        transfers = [agent.write("b", [(ours.address, theirs.address, NBYTES - (1 << 12))]) for _ in range(2)]
        mapped.free()
        if end == "cancel":
            for transfer in transfers:
                transfer.cancel()
        process.resume()
        for transfer in transfers:
            with pytest.raises(CanceledError if end == "cancel" else FreedMemoryError):
                transfer.wait()
        agent.read("b", [(another.address, theirs.address + NBYTES - 100, 100)]).wait()
        assert (memory == 7).all()


@pytest.mark.parametrize("path", ["process_vm", "unix", "tcp"])
def test_memory_that_is_protected(pair: Pair, mapped: Mapped, path: str) -> None:
    force_path(pair.a, path)
    with with_mapped(pair, mapped) as region:
        mapped.protect()
        with pytest.raises(TransferError, match=rf"agent b at {region.address:#x} can't be written"):
            pair.a.write("b", [(pair.our_region.address, region.address, 100)]).wait()


_HANDLERS = """
import ctypes, faulthandler, signal, sys
import numpy as np
from proxyccl.transfer import Agent, FreedMemoryError
from support.agents import Mapped
agent, memory, there = Agent("a", listen=()), Mapped(4096), np.zeros(4096, np.uint8)
ours, theirs = agent.register((memory.address, 4096)), agent.register(there)
case = sys.argv[1]
if case in ("enabled later", "a newer one, raised elsewhere"):
    faulthandler.enable()
if case == "taken away":
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
memory.free()
try:
    agent.read("a", [(ours.address, theirs.address, 4096)]).wait()
except FreedMemoryError:
    print("freed", flush=True)
if "raised elsewhere" in case:
    ctypes.string_at(8)
"""


@pytest.mark.parametrize(
    ("case", "status"),
    [
        ("enabled later", 0),
        ("taken away", 0),
        ("raised elsewhere", -signal.SIGSEGV),
        ("a newer one, raised elsewhere", -signal.SIGSEGV),
    ],
)
def test_other_handlers_of_the_same_signals(case: str, status: int) -> None:
    """A program may install a handler after ProxyCCL's handler. Faults outside transfers still end the process."""
    result = subprocess.run(
        [sys.executable, "-c", _HANDLERS, case],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.stdout, result.returncode) == ("freed\n", status), result.stderr
    assert ("Fatal Python error" in result.stderr) == (case == "a newer one, raised elsewhere")


def test_a_peer_that_frees_its_memory_and_ends_has_ended() -> None:
    """The peer frees its memory, stops, and is killed before it can report that the memory is gone."""

    def body(connection: socket.socket) -> None:
        with Agent("b", listen=()) as agent:
            memory = Mapped(NBYTES)
            agent.register((memory.address, NBYTES))
            connection.send(agent.metadata())
            connection.recv(1)
            memory.free()
            connection.send(b"freed")
            connection.recv(1)
            os._exit(0)

    with child(body) as process, Agent("a", listen=()) as agent:
        agent.add(process.receive())
        ours, theirs = agent.register(np.zeros(NBYTES, np.uint8)), agent.regions_of("b")[0]
        transfers = [agent.prepare("read", "b", [(ours.address, theirs.address, size)]) for size in (100, NBYTES)]
        canceled = agent.prepare("write", "b", [(ours.address, theirs.address, 100)])
        process.connection.send(b"1")
        assert process.receive() == b"freed"
        process.stop()
        for transfer in (*transfers, canceled):
            transfer.start()
        canceled.cancel()
        assert canceled.state is State.CANCELED
        process.kill()
        for transfer in transfers:
            with pytest.raises(DisconnectedError):
                transfer.wait()
