"""Transfer agents for tests: two agents in this process, and agents in child processes."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from proxyccl.channels.transfers.device_memory import Share
from proxyccl.channels.transfers.metadata import METADATA
from proxyccl.channels.transfers.regions import Region, columns_of
from proxyccl.transfer import Agent

PATHS = ("process_vm", "unix", "tcp")
"""The paths of host memory that work on every Linux machine."""

MAPPED_BYTES = 4 << 20
"""Bytes of the memory of the fixture `mapped`."""

_NOWHERE = 0x2000_0000_0000
"""The kernel maps nothing near this address by itself, so memory that is unmapped there stays unmapped."""

_numbers = itertools.count()

_MAP_FIXED = 0x10


def force_path(agent: Agent, path: str) -> None:
    """Makes an agent use `path` for the links that it opens after this call, even if a faster path is available."""
    agent._preparer.paths = frozenset([path])


class Pair:
    """Two agents, `a` and `b`, each with `nbytes` bytes of registered memory.

    Attributes:
        a, b: the agents; only `a` has added the metadata of the other.
        ours, theirs: the registered memory of `a` and of `b`, uint8.
    """

    def __init__(self, nbytes: int = 1 << 20, timeout: float | None = None) -> None:
        self.a, self.b = (Agent(name, listen=["127.0.0.1"], timeout=timeout) for name in "ab")
        self.ours = np.zeros(nbytes, np.uint8)
        self.theirs = np.random.default_rng(7).integers(0, 256, nbytes, dtype=np.uint8)
        self.our_region, self.their_region = self.a.register(self.ours), self.b.register(self.theirs)
        self.a.add(self.b.metadata())

    def blocks(self, *blocks: tuple[int, int, int]) -> Any:
        """Returns the rows that describe a transfer of agent `a`, one for each (offset in `ours`, offset in `theirs`,
        bytes).
        """
        base = (self.our_region.address, self.their_region.address, 0)
        return np.array(blocks, np.uint64).reshape(-1, 3) + np.array(base, np.uint64)

    def whole(self) -> Any:
        """Returns the row that describes a transfer of all of `ours` as one block."""
        return self.blocks((0, 0, len(self.ours)))

    def close(self) -> None:
        """Closes both agents."""
        self.a.close()
        self.b.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


class Mapped:
    """Host memory that is allocated by a separate mmap.

    Attributes:
        address: the address of the memory's first byte.

    Args:
        nbytes: size in bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = self._left = nbytes
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        arguments = (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, ctypes.c_long(0))
        place = ctypes.c_void_p(_NOWHERE + (next(_numbers) << 32))
        self.address = int(self._libc.mmap(place, ctypes.c_size_t(self._nbytes), *arguments))

    def free(self, start: int = 0) -> None:
        """Unmaps all bytes from offset `start` on."""
        if self._left > start:
            at, nbytes = ctypes.c_void_p(self.address + start), ctypes.c_size_t(self._left - start)
            assert self._libc.munmap(at, nbytes) == 0
            self._left = start

    def punch(self, start: int, nbytes: int) -> None:
        """Unmaps `nbytes` bytes from offset `start`."""
        assert self._libc.munmap(ctypes.c_void_p(self.address + start), ctypes.c_size_t(nbytes)) == 0

    def truncate(self) -> None:
        """Replaces the memory by a mapped file, and truncates that file to nothing."""
        file, shared = os.memfd_create("truncated"), mmap.MAP_SHARED | _MAP_FIXED
        os.ftruncate(file, self._nbytes)
        arguments = (mmap.PROT_READ | mmap.PROT_WRITE, shared, file, ctypes.c_long(0))
        assert self._libc.mmap(ctypes.c_void_p(self.address), ctypes.c_size_t(self._nbytes), *arguments) == self.address
        os.ftruncate(file, 0)
        os.close(file)

    def protect(self) -> None:
        """Makes the memory read-only."""
        assert self._libc.mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(self._nbytes), mmap.PROT_READ) == 0


@pytest.fixture
def mapped() -> Iterator[Mapped]:
    made = Mapped(MAPPED_BYTES)
    yield made
    made.free()


class LateMemory:
    """Host memory whose pages appear only when `appear` is called: until then, all threads that access it wait. Skips
    the test where this process may not use userfaultfd.

    Attributes:
        address, nbytes: the first address, and the size in bytes.
    """

    _API, _REGISTER, _ZEROPAGE, _CALL = 0xC018AA3F, 0xC020AA00, 0xC020AA04, 323

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._file = ctypes.CDLL(None).syscall(self._CALL, os.O_CLOEXEC)
        if self._file < 0:
            pytest.skip("this process may not use userfaultfd")
        fcntl.ioctl(self._file, self._API, bytearray(struct.pack("QQQ", 0xAA, 0, 0)))
        self._memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        fcntl.ioctl(self._file, self._REGISTER, bytearray(struct.pack("QQQQ", self.address, nbytes, 1, 0)))

    def wait_for_access(self) -> None:
        """Waits until a thread accesses the memory."""
        os.read(self._file, 32)

    def appear(self) -> None:
        """Makes the memory appear, full of zeros."""
        fcntl.ioctl(self._file, self._ZEROPAGE, bytearray(struct.pack("QQQQ", self.address, self.nbytes, 0, 0)))

    def close(self) -> None:
        """Lets all threads go on."""
        os.close(self._file)


class Child:
    """A process that runs a function.

    Attributes:
        pid: the process's number.
        connection: a socket that is connected to the function.
    """

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.connection = connection

    def kill(self) -> None:
        """Kills the process, and returns when it has ended."""
        os.kill(self.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def stop(self) -> None:
        """Stops the process, and returns when all its threads have stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def resume(self) -> None:
        """Resumes the process after `stop`."""
        os.kill(self.pid, signal.SIGCONT)

    def receive(self) -> bytes:
        """Waits for the function's next message and returns it."""
        return self.connection.recv(1 << 20)


@contextlib.contextmanager
def child(body: Callable[[socket.socket], object]) -> Iterator[Child]:
    """Runs a function in a forked child of this process. Kills the child at the end of the `with` block."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            body(theirs)
        finally:
            os._exit(0)
    theirs.close()
    ours.settimeout(60)
    try:
        yield Child(pid, ours)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ours.close()


def serve_memory(connection: socket.socket, nbytes: int = 4 << 20, value: int = 7, name: str = "b") -> None:
    """Runs an agent in a child process, with registered memory that is filled with `value`. Sends the agent's metadata
    over `connection`, then executes the commands "close", "fork" and "wait" until an empty message arrives or the
    connection is closed.
    """
    agent = Agent(name, listen=["127.0.0.1"])
    memory = np.full(nbytes, value, np.uint8)
    agent.register(memory)
    connection.send(agent.metadata())
    while command := connection.recv(100):
        if command == b"close":
            agent.close()
        if command == b"wait":
            agent.wait_for_message(60)
        if command == b"fork" and os.fork() == 0:
            connection.send(b"forked")
            connection.recv(1)  # blocks until the test ends
            os._exit(0)
        connection.send(b"done")
    os._exit(0)  # skips clean-up, because an agent whose memory is freed first would report a bad address


def metadata_of(agent: Agent, region: Region, *shares: Share, former: int = 0) -> tuple[bytes, int]:
    """Begins a registration of one region by an agent, after it has ended its registration with the number `former`.
    Returns metadata that describe only this registration, and its number.
    """
    ledger = agent._ledger
    if former:
        ledger.end([former])
    (number,) = ledger.begin(1)
    known = METADATA.decode(agent.metadata(()), "an agent")
    rows = columns_of([region], [number]).tobytes()
    return METADATA.encode(structs.replace(known, place=None, rows=rows, labels=[], shares=list(shares))), number


def add_changed(pair: Any, **fields: Any) -> None:
    """Makes agent `a` of a pair add the metadata of `b` anew, with other values of some fields."""
    known = METADATA.decode(pair.b.metadata(), "an agent")
    pair.a.remove("b")
    pair.a.add(METADATA.encode(structs.replace(known, **fields)))
