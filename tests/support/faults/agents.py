"""Agents that come and go under load, and every third is killed.

python tests/support/faults/agents.py --count 100 --seed 1

A case follows from its seed. One agent moves data to and from the peers, several at once, and cancels, while they are
killed, close or end at random moments. A finding is a wrong byte, a canceled transfer that still writes, a transfer
that does not end in time, an error with a peer that lives, or a descriptor that is left.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np

from proxyccl.channels.transfers.paths import PATHS
from proxyccl.transfer import Agent, CanceledError, DisconnectedError, Region, Transfer, TransferError
from support.agents import Child, child, serve_memory

_NBYTES = 1 << 20
_AT_ONCE = 4
_LIVES_SECONDS = 0.1
_NOTICED_SECONDS = 30.0
_WAIT_SECONDS = 60.0
_FATES = ("kill", "close", "end")
_WRONG = 255


class Visit:
    """A peer's life: what is done with it, and what happens to it. Its memory has the value `number`.

    Args:
        agent: that meets it.
        number: the peer's.
        process: the peer's.
        seed: of what happens.
    """

    def __init__(self, agent: Agent, number: int, process: Child, seed: int) -> None:
        self._agent, self._number, self._process, self._rng = agent, number, process, random.Random(seed)
        self._memory = np.zeros(_NBYTES, np.uint8)
        self._struck = threading.Event()

    def run(self) -> list[str]:
        """Findings."""
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
        """Reads the first half of the peer's memory, or writes the other, as one block or as many."""
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
        with contextlib.suppress(CanceledError):  # DisconnectedError is for the caller
            transfer.done()
        time.sleep(0.001)
        return "" if (self._memory == _WRONG).all() else f"{transfer} wrote after it was canceled"


def _name(number: int) -> str:
    return f"peer {number}"


def _served(number: int) -> Callable[[socket.socket], None]:
    return lambda connection: serve_memory(connection, _NBYTES, number, _name(number))


def run(seed: int, peers: int = 30, path: str | None = None) -> list[str]:
    """Runs a case. Returns its findings.

    Args:
        seed: that it follows from.
        peers: how many come and go.
        path: how data moves; None: one in turn.
    """
    rng = random.Random(seed)
    with Agent("under load", listen=["127.0.0.1"], paths=[path or PATHS[seed % len(PATHS)]]) as agent:
        before = len(os.listdir("/proc/self/fd"))
        with contextlib.ExitStack() as stack:
            # Before there are threads: one that imports a module at a fork would leave its child the module's lock.
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
    """The command line. Returns 1 if there are findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="cases to run")
    parser.add_argument("--seed", type=int, default=1, help="the first one's; a case follows from its seed")
    options = parser.parse_args()
    findings = []
    for seed in range(options.seed, options.seed + options.count):
        found = run(seed)
        findings += found
        for finding in found:
            print(f"agents, seed {seed}: {finding}", flush=True)
    print(f"agents: {options.count} cases, {len(findings)} findings", flush=True)
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
