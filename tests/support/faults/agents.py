"""Tests agents that start and end under load, and agents that restart under the same names.

python tests/support/faults/agents.py --count 100 --seed 1

A seed determines a case, which has two parts. In the first part an agent transfers data to and from several peers
concurrently, and cancels transfers, while the peers are killed, close or end at random times. Findings are wrong bytes,
canceled transfers that still write, transfers that do not end in time, errors with a live peer, and descriptors that
are not closed.

In the second part, each peer restarts repeatedly under the same name, and registers, deregisters and frees memory at
the same addresses. The agent keeps the transfers and metadata of all registrations, and uses them even after their
registrations have ended. Each incarnation of a peer verifies its own memory. Further findings are transfers
that complete although their memory is deregistered, metadata that the agent accepts from an ended peer, bytes
read from another incarnation, and bytes written to memory that was not registered for the transfer.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np
from numpy.typing import NDArray

from proxyccl.channels.transfers.metadata import METADATA
from proxyccl.device.errors import ClosedError
from proxyccl.transfer import (
    Agent,
    CanceledError,
    DisconnectedError,
    FreedMemoryError,
    NotRegisteredError,
    Region,
    Transfer,
    TransferError,
    TransferTimeoutError,
    UnknownAgentError,
    shared_empty,
)
from support.agents import PATHS, Child, child, serve_memory

_NBYTES = 1 << 20
_AT_ONCE = 4
_LIVES_SECONDS = 0.1
_NOTICED_SECONDS = 30.0
_WAIT_SECONDS = 60.0
_FATES = ("kill", "close", "end")
_WRONG = 255
_SLOTS = 3
_ADDRESS = 1 << 45
_PRIVATE_FIXED = 0x2 | 0x20 | 0x100000  # MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
_LIBC = ctypes.CDLL(None)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Visit:
    """Transfers with one peer of the first part, until the peer ends. The peer's memory is filled with `number`.

    Args:
        agent: the agent that transfers data to and from the peer.
        number: the peer's number.
        process: the peer's process.
        seed: the seed of all random choices.
    """

    def __init__(self, agent: Agent, number: int, process: Child, seed: int) -> None:
        self._agent, self._number, self._process, self._rng = agent, number, process, random.Random(seed)
        self._memory = np.zeros(_NBYTES, np.uint8)
        self._struck = threading.Event()

    def run(self) -> list[str]:
        """Returns the findings."""
        name = _name(self._number)
        ours = self._agent.register(self._memory)
        self._agent.add(self._process.receive())
        (theirs,) = self._agent.regions_of(name)
        timer = threading.Timer(self._rng.uniform(0, _LIVES_SECONDS), self._strike)
        timer.start()
        try:
            findings = self._work(name, ours, theirs)
        finally:
            timer.join()
            self._agent.remove(name)
            self._agent.deregister(ours)
        return [f"{name}, {_FATES[self._number % 3]}: {finding}" for finding in findings]

    def _strike(self) -> None:
        self._struck.set()
        fate = _FATES[self._number % 3]
        if fate == "kill":
            self._process.kill()
        else:
            self._process.connection.send(b"close" if fate == "close" else b"")

    def _work(self, name: str, ours: Region, theirs: Region) -> list[str]:
        deadline = time.monotonic() + _NOTICED_SECONDS
        while time.monotonic() < deadline:
            try:
                if finding := self._step(name, ours, theirs):
                    return [finding]
            except DisconnectedError as error:
                return [] if self._struck.is_set() else [f"a living peer: {error!r}"]
            except TransferError as error:
                return [repr(error)]
        return ["its end was not noticed"]

    def _step(self, name: str, ours: Region, theirs: Region) -> str:
        """Notifies the peer, reads its memory's first half, or writes the second half. Returns a finding, or ""."""
        half = _NBYTES // 2
        operation = self._rng.choice(["read", "write", "notify"])
        if operation == "notify":
            self._agent.notify(name, self._rng.randbytes(self._rng.randrange(10_000)))
            return ""
        start, size = (0 if operation == "read" else half), self._rng.choice([half, 1000, 64])
        starts = start + np.arange(0, half - size + 1, size * 2, dtype=np.uint64)
        rows = np.stack((ours.address + starts, theirs.address + starts, np.full_like(starts, size)), 1)
        self._memory[:] = _WRONG
        transfer = self._agent.prepare(operation, name, rows).start(self._rng.choice([None, b"told"]))
        if self._rng.random() < 0.3:
            return self._cancel(transfer)
        if self._rng.random() < 0.5:
            transfer.wait(_WAIT_SECONDS)
        else:
            bound = time.monotonic() + _WAIT_SECONDS
            while not transfer.done():
                if time.monotonic() > bound:
                    return f"{transfer} did not end"
        moved = self._memory[: half // size * size].reshape(-1, size)[::2]
        if operation == "read" and not (moved == self._number).all():
            return f"wrong data after {transfer}"
        return ""

    def _cancel(self, transfer: Transfer) -> str:
        time.sleep(self._rng.choice([0, 0.0005]))
        transfer.cancel()
        self._memory[:] = _WRONG
        with contextlib.suppress(CanceledError):  # the caller handles DisconnectedError
            transfer.done()
        time.sleep(0.001)
        return "" if (self._memory == _WRONG).all() else f"{transfer} wrote after it was canceled"


def _name(number: int) -> str:
    return f"peer {number}"


def _served(number: int) -> Callable[[socket.socket], None]:
    return lambda connection: serve_memory(connection, _NBYTES, number, _name(number))


class Slot:
    """The expected contents of a range of a peer's memory, and the transfers that were prepared for the range. The peer
    fills new memory with `value`; transfers read the range's first half, and fill the second half with `written`.
    """

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        self.former: list[Transfer] = []
        self.value = self.written = 0
        self.is_registered = False


class Lives:
    """Transfers with one peer of the second part, which restarts under the same name, and the expected contents of the
    peer's memory.

    Args:
        agent: the agent that transfers data to and from the peer.
        number: the peer's number.
        processes: the processes of the peer's successive incarnations.
        seed: the seed of all random choices.
    """

    def __init__(self, agent: Agent, number: int, processes: list[Child], seed: int) -> None:
        self._agent, self._name, self._rng = agent, _name(number), random.Random(seed)
        self._processes = processes
        self._slots = [Slot() for _ in range(_SLOTS)]
        self._metadata: list[bytes] = []  # the peer's metadata, one element per registration
        self._memory = np.zeros(_NBYTES, np.uint8)

    def run(self) -> list[str]:
        """Returns the findings."""
        ours = self._agent.register(self._memory)
        findings: list[str] = []
        for life, process in enumerate(self._processes):
            for slot in self._slots:
                slot.former += slot.transfers
                slot.transfers = []
            if life > 0:
                self._agent.remove(self._name)
            metadata = process.receive()
            self._agent.add(metadata)
            self._token = token_of(metadata)
            found = self._live(process, ours)
            fate = self._rng.choice(_FATES)
            if fate == "kill":
                process.kill()
            else:
                process.connection.send(b"close" if fate == "close" else b"")
            findings += [f"{self._name}, life {life}: {finding}" for finding in found]
        self._agent.remove(self._name)
        self._agent.deregister(ours)
        return findings

    def _live(self, process: Child, ours: Region) -> list[str]:
        for slot in range(_SLOTS):
            self._renew(process, slot, ours)
        for _ in range(self._rng.randrange(10, 30)):
            number = self._rng.randrange(_SLOTS)
            step = self._rng.choice(["renew", "current", "current", "former", "former", "late"])
            try:
                if step == "renew":
                    self._renew(process, number, ours)
                elif step == "current" and self._slots[number].is_registered:
                    finding = self._use_current(self._slots[number])
                elif step == "former" and self._slots[number].former:
                    finding = self._use_former(self._slots[number])
                elif step == "late" and self._metadata:
                    finding = self._add_late()
                else:
                    continue
            except TransferError as error:
                return [f"{step}: {error!r}"]
            if step != "renew" and finding:
                return [finding]
            process.connection.send(b"look")
            seen = tuple(process.receive())
            expected = tuple(value for slot in self._slots for value in (slot.value, slot.written))
            if seen != expected:
                return [f"{step}: the memory is {seen}, and must be {expected}"]
        return []

    def _renew(self, process: Child, number: int, ours: Region) -> None:
        """Makes the peer deregister and free a slot's memory and map new memory at the same address. Prepares transfers
        if the new memory is registered.
        """
        slot = self._slots[number]
        slot.value, slot.is_registered = self._rng.randrange(1, 200), self._rng.random() < 0.7
        slot.written = slot.value
        slot.former += slot.transfers
        slot.transfers = []
        process.connection.send(bytes([number, slot.value, slot.is_registered, self._rng.random() < 0.5]))
        metadata = process.receive()
        if not slot.is_registered:
            return
        self._metadata.append(metadata)
        self._agent.add(metadata)
        label = f"{number} {slot.value}"
        theirs = next(each for each in reversed(self._agent.regions_of(self._name)) if each.label == label)
        half = _NBYTES // 2
        for operation, start in (("read", 0), ("write", half)):
            row = (ours.address + start, theirs.address + start, half)
            slot.transfers.append(self._agent.prepare(operation, self._name, [row]))

    def _use_current(self, slot: Slot) -> str:
        transfer = self._rng.choice(slot.transfers)
        written = self._rng.randrange(200, _WRONG)
        self._memory[:] = written if transfer.writes else _WRONG
        transfer.start(self._rng.choice([None, b"told"])).wait(_WAIT_SECONDS)
        if transfer.writes:
            slot.written = written
        elif not (self._memory[: _NBYTES // 2] == slot.value).all():
            return f"wrong data after {transfer}"
        return ""

    def _use_former(self, slot: Slot) -> str:
        transfer = self._rng.choice(slot.former)
        self._memory[:] = _WRONG
        try:
            transfer.start(b"never told").wait(_WAIT_SECONDS)
        except TransferTimeoutError as error:
            return repr(error)
        except (NotRegisteredError, FreedMemoryError, DisconnectedError, ClosedError):
            return "" if (self._memory == _WRONG).all() else f"{transfer} read something"
        return f"{transfer} is done, although its registration has ended"

    def _add_late(self) -> str:
        """Adds old metadata of the peer. The agent must refuse metadata of the peer's earlier incarnations. Returns a
        finding, or "".
        """
        metadata = self._rng.choice(self._metadata)
        is_of_this_life = token_of(metadata) == self._token
        try:
            self._agent.add(metadata)
        except UnknownAgentError:
            return "late metadata of this agent were refused" if is_of_this_life else ""
        return "" if is_of_this_life else "metadata of an ended agent were taken"


def token_of(data: bytes) -> bytes:
    """Returns the token in an agent's metadata."""
    return METADATA.decode(data, "an agent").token


def _serve_slots(number: int) -> Callable[[socket.socket], None]:
    """Returns the body of an incarnation's process, which answers b"look" with the values in its memory, and
    answers a message of four bytes (`Lives._renew`) by renewing a slot.
    """

    def serve(connection: socket.socket) -> None:
        agent = Agent(_name(number), listen=["127.0.0.1"])
        memory: list[Any] = [None] * _SLOTS
        regions: list[Region | None] = [None] * _SLOTS
        connection.send(agent.metadata(()))
        while command := connection.recv(100):
            if command == b"close":
                agent.close()
                connection.recv(1)
                break
            if command == b"look":
                halves = (half for each in memory for half in np.split(each, 2))
                connection.send(bytes(half[0] if (half == half[0]).all() else _WRONG for half in halves))
                continue
            slot, value, is_registered, is_shared = command
            if regions[slot] is not None:
                agent.deregister(regions[slot])
                regions[slot] = None
            memory[slot] = None  # free the old memory first, because the new memory gets the same address
            at = _ADDRESS + (number * _SLOTS + slot) * 2 * _NBYTES
            memory[slot] = shared_empty(_NBYTES) if is_shared else mapped_at(at, _NBYTES)
            memory[slot][:] = value
            if is_registered:
                regions[slot] = region = agent.register(memory[slot], label=f"{slot} {value}")
                connection.send(agent.metadata([region], place=False))
            else:
                connection.send(b"none")
        os._exit(0)

    return serve


class _Fixed:
    """Memory at a given address, unmapped when its last array is freed."""

    def __init__(self, address: int, nbytes: int) -> None:
        if _LIBC.mmap(address, nbytes, 3, _PRIVATE_FIXED, -1, 0) != address:
            raise OSError("the address is taken")
        self._range = address, nbytes
        self.__array_interface__ = {"data": (address, False), "typestr": "|u1", "shape": (nbytes,), "version": 3}

    def __del__(self) -> None:
        _LIBC.munmap(*self._range)


def mapped_at(address: int, nbytes: int) -> NDArray[np.uint8]:
    """Maps new private memory at an address."""
    return np.asarray(_Fixed(address, nbytes))


def run_lives(seed: int, peers: int = 4, lives: int = 4, path: str | None = None) -> list[str]:
    """Runs the second part of a case. Returns its findings.

    Args:
        seed: determines the case.
        peers: number of peers, each with its own name.
        lives: number of times that each peer starts.
        path: the transport of the data; if None, the seed chooses one, or "shared_memory" and "process_vm".
    """
    rng = random.Random(seed)
    paths = [path] if path else [["shared_memory", "process_vm"], *([each] for each in PATHS)][seed % (len(PATHS) + 1)]
    with Agent("stays", listen=["127.0.0.1"], paths=paths) as agent, contextlib.ExitStack() as stack:
        processes = [
            [stack.enter_context(child(_serve_slots(number))) for _ in range(lives)] for number in range(peers)
        ]
        with ThreadPoolExecutor(peers) as pool:
            each = [
                pool.submit(Lives(agent, number, processes[number], rng.getrandbits(32)).run) for number in range(peers)
            ]
            return [finding for visits in each for finding in visits.result()]


def run(seed: int, peers: int = 30, path: str | None = None) -> list[str]:
    """Runs a case. Returns its findings.

    Args:
        seed: determines the case.
        peers: number of peers.
        path: the transport of the data; None if the seed chooses one.
    """
    rng = random.Random(seed)
    with Agent("under load", listen=["127.0.0.1"], paths=[path or PATHS[seed % len(PATHS)]]) as agent:
        before = len(os.listdir("/proc/self/fd"))
        with contextlib.ExitStack() as stack:
            # Fork before there are threads: if a thread imports a module during a fork, the child inherits the module's
            # lock.
            processes = [stack.enter_context(child(_served(number))) for number in range(peers)]
            pool = stack.enter_context(ThreadPoolExecutor(_AT_ONCE))
            visits = [
                pool.submit(Visit(agent, number, process, rng.getrandbits(32)).run)
                for number, process in enumerate(processes)
            ]
            findings = [finding for visit in visits for finding in visit.result()]
        deadline = time.monotonic() + _NOTICED_SECONDS
        while (after := len(os.listdir("/proc/self/fd"))) > before and time.monotonic() < deadline:
            time.sleep(0.01)
    return findings + ([f"{after - before} descriptors are left"] if after > before else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="cases to run")
    parser.add_argument("--seed", type=int, default=1, help="the first one's; a case follows from its seed")
    options = parser.parse_args()
    findings = []
    for seed in range(options.seed, options.seed + options.count):
        found = run(seed) + run_lives(seed)
        findings += found
        for finding in found:
            print(f"agents, seed {seed}: {finding}", flush=True)
    print(f"agents: {options.count} cases, {len(findings)} findings", flush=True)
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
