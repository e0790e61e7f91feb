"""Memory that its owner frees or deregisters while a peer still knows it: who is told what."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from proxyccl.transfer import (
    Agent,
    DisconnectedError,
    FreedMemoryError,
    NotRegisteredError,
    Region,
    State,
    TransferError,
)
from support.agents import Pair, child, force_path

NBYTES = 4 << 20
NOWHERE = 0x2000_0000_0000
"""The kernel maps nothing here by itself, so memory that is freed here stays so."""

pytestmark = [
    pytest.mark.host_only("agents move the host's memory, whatever the runtime"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


class Mapped:
    """Memory of the host that is mapped by itself.

    Attributes:
        address: its first byte.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        arguments = (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, ctypes.c_long(0))
        self.address = int(self._libc.mmap(ctypes.c_void_p(NOWHERE), ctypes.c_size_t(NBYTES), *arguments))
        self._left = NBYTES

    def free(self, start: int = 0) -> None:
        """Unmaps it from an offset on."""
        if self._left > start:
            at, nbytes = ctypes.c_void_p(self.address + start), ctypes.c_size_t(self._left - start)
            assert self._libc.munmap(at, nbytes) == 0
            self._left = start

    def protect(self) -> None:
        """Makes it read-only."""
        assert self._libc.mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(NBYTES), mmap.PROT_READ) == 0


@pytest.fixture
def mapped() -> Iterator[Mapped]:
    made = Mapped()
    yield made
    made.free()


@contextlib.contextmanager
def with_mapped(pair: Pair, mapped: Mapped) -> Iterator[Region]:
    """Memory of b that a knows."""
    region = pair.b.register((mapped.address, NBYTES))
    pair.a.add(pair.b.metadata())
    yield region
    if region in pair.b.regions:
        pair.b.deregister(region)


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("nbytes", [1 << 16, NBYTES])
def test_a_peer_that_freed_its_memory(pair: Pair, mapped: Mapped, operation: str, nbytes: int) -> None:
    """The kernel copies; a short transfer by the caller, a long one by both threads."""
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
            with pytest.raises(NotRegisteredError, match=f"has deregistered its memory at {region.address:#x}"):
                pair.a.prepare(operation, "b", blocks).start().wait()
    pair.a.prepare("write", "b", pair.whole()).start(b"the link goes on").wait()
    pair.b.wait_for_message(60)
    assert pair.b.messages() == [("a", b"the link goes on")]


@pytest.mark.parametrize("path", ["unix", "tcp"])
def test_a_socket_and_blocks_before_one_that_was_freed(pair: Pair, mapped: Mapped, path: str) -> None:
    """Small ones that arrive with their request, of which the last spans the end of the memory that is left."""
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


def test_memory_of_this_agent(pair: Pair, mapped: Mapped) -> None:
    ours = pair.a.register((mapped.address, NBYTES))
    mapped.free()
    with pytest.raises(FreedMemoryError, match=rf"this agent's memory at {ours.address:#x} was freed"):
        pair.a.read("b", [(ours.address, pair.their_region.address, 100)]).wait()


@pytest.mark.parametrize("path", ["process_vm", "unix", "tcp"])
def test_memory_that_is_protected(pair: Pair, mapped: Mapped, path: str) -> None:
    force_path(pair.a, path)
    with with_mapped(pair, mapped) as region:
        mapped.protect()
        with pytest.raises(TransferError, match=rf"agent b at {region.address:#x} can't be written"):
            pair.a.write("b", [(pair.our_region.address, region.address, 100)]).wait()


def test_a_peer_that_frees_its_memory_and_ends_has_ended() -> None:
    """It does not answer what became of its memory: it stops, and is killed."""

    def body(connection: socket.socket) -> None:
        with Agent("b", listen=()) as agent:
            memory = Mapped()
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
