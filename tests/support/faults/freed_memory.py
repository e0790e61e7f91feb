"""Frees, partly unmaps, write-protects or truncates memory at random times during transfers.

python tests/support/faults/freed_memory.py --count 100 --seed 1

A seed determines a case, which runs in a separate process. Two agents transfer data over one transport: some transfers
use memory that is harmed during the transfer, others use intact memory. Findings are processes that end by a signal,
transfers that do not end in time, transfers that fail although their memory is intact, wrong bytes, and lost links.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np

from proxyccl.transfer import Agent, CanceledError, DisconnectedError, Region, Transfer, TransferError, shared_empty
from support.agents import Mapped, child

_PATHS = ("self", "shared_memory", "process_vm", "unix", "tcp")
_NBYTES = 4 << 20
_PAGE = 4096
_ROUNDS = 20
_HARM_SECONDS = 0.002
_WAIT_SECONDS = 30.0
_CASE_SECONDS = 240.0


class Side:
    """One agent's memory: one array that stays intact, and in each round memory that may be harmed.

    Args:
        agent: the agent that registers the memory.
        shared: whether all memory is from `shared_empty` and stays intact.
    """

    def __init__(self, agent: Agent, *, shared: bool) -> None:
        self._agent, self._shared = agent, shared
        self.stays = shared_empty(_NBYTES) if shared else np.zeros(_NBYTES, np.uint8)
        self.region = agent.register(self.stays)

    def renew(self, *, doomed: bool) -> tuple[Mapped | None, Region]:
        """Returns new memory to harm and the new memory's region, or None and the region of the intact memory."""
        if not doomed or self._shared:
            return None, self.region
        memory = Mapped(_NBYTES)
        return memory, self._agent.register((memory.address, _NBYTES))

    def end(self, memory: Mapped | None, region: Region) -> None:
        """Deregisters and frees memory that `renew` made."""
        if memory is not None:
            self._agent.deregister(region)
            memory.free()


class Case:
    """A case's agents and their transfers.

    Args:
        seed: determines the case.
        path: the path of the data.
    """

    def __init__(self, seed: int, path: str) -> None:
        self._rng = random.Random(seed)
        only = None if path == "self" else [path, "process_vm"] if path == "shared_memory" else [path]
        self._a, self._b = Agent("a", paths=only), Agent("b", listen=["127.0.0.1"])
        self._peer, owner = ("a", self._a) if path == "self" else ("b", self._b)
        self._here, self._there = Side(self._a, shared=False), Side(owner, shared=path == "shared_memory")
        self._path = path

    def run(self) -> list[str]:
        """Returns the findings."""
        findings: list[str] = []
        for number in range(_ROUNDS):
            findings += [f"round {number}: {finding}" for finding in self._round(1 + number % 200)]
        self._a.close()
        self._b.close()
        return findings

    def _round(self, value: int) -> list[str]:
        rng = self._rng
        doomed = rng.choice(["here", "there", "both"])
        ours, near = self._here.renew(doomed=doomed != "there")
        theirs, far = self._there.renew(doomed=doomed != "here")
        if self._path != "self":
            self._a.add(self._b.metadata())
        self._there.stays[: _NBYTES // 2] = value
        self._here.stays[:] = 255
        half = _NBYTES // 2
        fine = self._a.prepare("read", self._peer, [(self._here.region.address, self._there.region.address, half)])
        size = rng.choice([100, 70_000, _NBYTES // 2])
        at = [rng.randrange(_NBYTES // 2 - size + 1) for _ in range(2)]
        writes = rng.random() < 0.5
        # In intact memory use the second half, because the transfer `fine` uses the first half.
        place = (
            near.address + at[0] + (half if ours is None else 0),
            far.address + at[1] + (half if theirs is None else 0),
        )
        harmed = self._a.prepare("write" if writes else "read", self._peer, [(*place, size)])
        timer = threading.Timer(
            rng.choice([0, rng.uniform(0, _HARM_SECONDS)]), self._harm, (ours, theirs, rng.random())
        )
        timer.start()
        harmed.start()
        fine.start()
        if rng.random() < 0.3:
            harmed.cancel()
        findings = [self._end(harmed, may_fail=True), self._end(fine, may_fail=False)]
        timer.join()
        findings.append(self._end(harmed.start(), may_fail=True))  # start the transfer again on harmed memory
        if not (self._here.stays[:half] == value).all():
            findings.append("a wrong byte of a transfer whose memory stays")
        self._here.end(ours, near)
        self._there.end(theirs, far)
        return [finding for finding in findings if finding]

    def _harm(self, ours: Mapped | None, theirs: Mapped | None, what: float) -> None:
        for memory in filter(None, (ours, theirs)):
            if what < 0.25:
                memory.free()
            elif what < 0.5:
                memory.punch(int(what * _NBYTES) // _PAGE * _PAGE, 16 * _PAGE)
            elif what < 0.75:
                memory.protect()
            else:
                memory.truncate()

    def _end(self, transfer: Transfer, *, may_fail: bool) -> str:
        """Waits for a transfer, or polls until it is done. Returns a finding, or ""."""
        bound = time.monotonic() + _WAIT_SECONDS
        try:
            if self._rng.random() < 0.5:
                transfer.wait(_WAIT_SECONDS)
            while not transfer.done():
                if time.monotonic() > bound:
                    return f"{transfer} did not end"
        except DisconnectedError as error:
            return f"the link was lost: {error}"
        except (CanceledError, TransferError) as error:
            return "" if may_fail and not isinstance(error, TimeoutError) else f"{transfer}: {error!r}"
        return ""


def _body(connection: socket.socket, seed: int, path: str) -> None:
    try:
        findings = Case(seed, path).run()
    except BaseException:
        findings = [traceback.format_exc()]
    connection.send("\n".join(findings).encode()[: 1 << 16] or b"none")


def run(seed: int, path: str | None = None) -> list[str]:
    """Runs a case. Returns its findings.

    Args:
        seed: determines the case.
        path: the transport of the data; None if the seed chooses one.
    """
    path = path or _PATHS[seed % len(_PATHS)]
    with child(lambda connection: _body(connection, seed, path)) as process:
        process.connection.settimeout(_CASE_SECONDS)
        try:
            findings = process.receive().decode()
        except TimeoutError:
            return [f"{path}: it did not end"]
        if not findings:
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            status = 0 if ended is None else ended.si_status
            return [f"{path}: its process ended by {signal.strsignal(status) or status}"]
    return [] if findings == "none" else [f"{path}, {finding}" for finding in findings.splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="cases to run")
    parser.add_argument("--seed", type=int, default=1, help="the first one's; a case follows from its seed")
    options = parser.parse_args()
    findings = 0
    for seed in range(options.seed, options.seed + options.count):
        for finding in run(seed):
            findings += 1
            print(f"freed memory, seed {seed}: {finding}", flush=True)
    print(f"freed memory: {options.count} cases, {findings} findings", flush=True)
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main())
