"""Kills ranks that serve a mixture of experts, and replaces them, with faults at random.

python tests/support/faults/healing.py --count 100 --seed 1

A seed determines a case: which of four ranks are killed, and when. While all ranks are alive, they move experts between
their places, with their weights, and empty places. Ranks are killed at a random time, while experts move, while the
others recover from a loss, or while a new process joins; the victim may be the new process. The case ends when all
ranks have been running for some steps after the last kill.

Each rank checks every result of every step: it must be the exact sum over the experts that have a place on a remaining
rank. Findings are wrong results, errors that are not the library's, and cases that do not end in time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np
from numpy.typing import NDArray

from proxyccl import Communicator, CommunicatorError, EPAll2AllLayer, FileBootstrap, ProxyCCLError

RANKS, PER_RANK, EXPERTS, TOKENS, HIDDEN, TOPK = 4, 3, 8, 8, 64, 2
FIRST = (0, 1, 2, 3, 0, 4, 5, 1, 7, 6, 2, -1)
_LARGE = 4 << 20  # bytes of a place; moves of weights last for several steps
_TIMEOUT_SECONDS = 6.0
_JOIN_SECONDS = 2.0
_START_SECONDS = 60.0
_CASE_SECONDS = 120.0
_LAST_STEPS = 10
_MOST_STRIKE_DELAY = 0.05
_AFTER_A_LOSS = ("joining", "error")
"""The events that follow only after a loss: a rank has learned of a loss, or waits for a new process."""


@dataclass(frozen=True)
class Plan:
    """The task of a rank's process.

    Attributes:
        directory: the directory of the case.
        seed: the seed of the moves.
        number: the rank's number.
        attempt: 0, or the number of the attempt to replace a rank.
        lost: the ranks that are lost when this rank has joined.
        placement: the placement when this rank joins.
    """

    directory: str
    seed: int
    number: int
    attempt: int = 0
    lost: Sequence[int] = ()
    placement: Sequence[int] = FIRST

    @property
    def bootstrap(self) -> FileBootstrap:
        return bootstrap_of(Path(self.directory), self.attempt, self.number, self.lost)


def bootstrap_of(directory: Path, attempt: int, number: int, lost: Sequence[int]) -> FileBootstrap:
    left = [rank for rank in range(RANKS) if rank not in lost]
    return FileBootstrap(directory / f"group-{attempt}", left.index(number), len(left))


def write(path: Path, data: bytes) -> None:
    """Creates a file that has all of its contents as soon as it is visible."""
    draft = path.with_name(f"draft-{os.getpid()}")
    draft.write_bytes(data)
    draft.rename(path)


def weights_of(expert: int) -> NDArray[np.float32]:
    if expert < 0:
        return np.full(HIDDEN, -1, np.float32)
    return np.random.default_rng(expert).integers(1, 9, HIDDEN).astype(np.float32)


def say(event: str, **fields: Any) -> None:
    os.write(1, (json.dumps({"event": event, **fields}) + "\n").encode())


# -- a rank ---


class Rank:
    """A rank that serves until the case ends."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self._directory = plan, Path(plan.directory)
        self._first, self._tried = plan.number * PER_RANK, plan.attempt
        own = plan.placement[self._first : self._first + PER_RANK]
        self._weights = np.stack([weights_of(expert) for expert in own])
        self._large = np.repeat(np.array(own, np.int8)[:, None], _LARGE, axis=1)
        bootstrap = plan.bootstrap
        if plan.attempt:
            write(self._directory / f"ready-{plan.attempt}", b"")
        timeout = _TIMEOUT_SECONDS if plan.attempt else _START_SECONDS
        comm = Communicator(bootstrap, "host", timeout=timeout)
        comm.timeout = _TIMEOUT_SECONDS
        sizes = TOKENS, HIDDEN, TOPK, comm.rank, len(FIRST), comm.local_world_size, comm.world_size
        options = {"lost_ranks": plan.lost, "placement": plan.placement}
        self.layer = EPAll2AllLayer(comm, *sizes, dtype="float32", **options)

    def run(self) -> None:
        """Serves until all ranks see that the case is to end."""
        self._tell()
        step = 0
        while True:
            try:
                ready = [int(path.name.removeprefix("ready-")) for path in self._directory.glob("ready-*")]
                own = max([each for each in ready if each > self._tried], default=0), step
                everyone = self._gather((*own, (self._directory / "stop").exists()))
                step = max(theirs[1] for theirs in everyone)
                if all(theirs[2] for theirs in everyone):
                    break
                attempt = min(theirs[0] for theirs in everyone)
                if self.layer.lost_ranks and attempt:
                    self._tried = attempt
                    self._grow(attempt)
                    continue
                if not self.layer.lost_ranks:
                    self._move()
                self._serve(step)
                step += 1
            except CommunicatorError as error:
                say("error", kind=type(error).__name__, message=str(error).partition("\n")[0])
                self.layer = self.layer.shrink()
                self._tell()
        self.layer.finalize()
        self.layer.ctx.communicator.close()
        say("done", steps=step)

    def _tell(self) -> None:
        say("state", lost=self.layer.lost_ranks, placement=self.layer.placement)

    def _gather(self, own: tuple[Any, ...]) -> list[Any]:
        return [json.loads(theirs) for theirs in self.layer.ctx.communicator.all_gather_bytes(json.dumps(own).encode())]

    def _grow(self, attempt: int) -> None:
        """Tries to take in a new process. All ranks make this call together."""
        plan, old = json.loads((self._directory / f"attempt-{attempt}").read_bytes()), self.layer
        lost = [rank for rank in old.lost_ranks if rank != plan["number"]]
        if plan["lost"] != lost or tuple(plan["placement"]) != old.placement:
            return  # the new process ends by its time-out
        say("joining")
        try:
            bootstrap = bootstrap_of(self._directory, attempt, self.plan.number, lost)
            comm = old.ctx.communicator.grow(bootstrap, timeout=_JOIN_SECONDS)
        except CommunicatorError as error:
            say("error", kind=type(error).__name__, message=str(error).partition("\n")[0])
            old.ctx.communicator.check()
            return
        comm.timeout = _TIMEOUT_SECONDS
        while True:
            try:
                self.layer = old.grow(comm, lost_ranks=lost)
                break
            except CommunicatorError as error:
                say("error", kind=type(error).__name__, message=str(error).partition("\n")[0])
                left = [rank for rank in range(RANKS) if rank not in lost]
                comm = comm.shrink()
                lost = [rank for rank in range(RANKS) if rank not in {left[member] for member in comm.members}]
        self._tell()
        old.finalize()
        old.ctx.communicator.close(wait=False)

    def _move(self) -> None:
        """Makes a call of `place`, which moves experts or empties places. All ranks make this call together. The
        current placement determines the next one, so the ranks repeat the same call until the placement changes.
        """
        placement = list(self.layer.placement or ())
        rng = random.Random(f"{self.plan.seed} {placement}")
        empties = rng.random() < 0.3
        for _ in range(rng.randint(1, 3)):
            place = rng.choice([p for p, e in enumerate(placement) if e < 0 or placement.count(e) > 1])
            placement[place] = -1 if empties else rng.randrange(EXPERTS)
        say("placing")
        if self.layer.place(placement, None if empties else [self._weights, self._large]):
            for local, expert in enumerate(placement[self._first : self._first + PER_RANK]):
                if expert < 0:
                    self._weights[local] = self._large[local] = -1

    def _serve(self, step: int) -> None:
        layer, number = self.layer, self.plan.number
        rng = np.random.default_rng([self.plan.seed, step, number])
        count = int(rng.integers(0, TOKENS + 1))
        tokens = rng.integers(0, 50, (count, HIDDEN)).astype(np.float32)
        ids = rng.integers(0, EXPERTS, (count, TOPK)).astype(np.int32)
        rows, _, desc = layer.dispatch(tokens, ids)
        first = layer.ctx.communicator.rank * PER_RANK
        counts = desc.counts.sum(axis=0)[first : first + PER_RANK]
        out = layer.combine(rows * np.repeat(self._weights, counts, axis=0), desc)
        placement = np.array(layer.placement)
        here = {e for p, e in enumerate(placement) if p // PER_RANK not in layer.lost_ranks}
        factors = np.stack([weights_of(e) * (e in here) for e in range(EXPERTS)])
        own = placement[self._first : self._first + PER_RANK, None]
        moved = ((self._large[:, ::4096] == own) | (own < 0)).all()
        if not moved or not np.array_equal(out, tokens * factors[ids].sum(axis=1)):
            say("wrong", step=step, placement=layer.placement, lost=layer.lost_ranks)
            os._exit(3)
        say("step", whole=not layer.lost_ranks)


def run_rank(plan: Plan) -> int:
    try:
        Rank(plan).run()
    except ProxyCCLError as error:
        say("ended", kind=type(error).__name__, message=str(error).partition("\n")[0])
        return 4
    return 0


# -- the case ---


class Child:
    """A rank's process, and the messages that it has printed."""

    def __init__(self, plan: Plan, notice: Callable[[Child, str], None]) -> None:
        self.plan, self.killed, self.joined = plan, False, False
        self.state: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self.whole_steps, self.stall, self._last_step = 0, 0.0, 0.0
        self._notice = notice
        self._errors = Path(plan.directory) / f"errors-{plan.number}-{plan.attempt}"
        command = [sys.executable, __file__, "--rank", json.dumps(asdict(plan))]
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said = json.loads(line)
            event, now = said["event"], time.monotonic()
            if event == "step":
                if self._last_step:
                    self.stall = max(self.stall, now - self._last_step)
                self._last_step = now
                self.whole_steps = self.whole_steps + 1 if said["whole"] else 0
            else:
                self.last = said
            if event == "state":
                self.state, self.joined = said, True
            self._notice(self, event)

    def strike(self) -> None:
        self.killed = True
        self.process.kill()

    def errors(self) -> str:
        return self._errors.read_text()[-3000:]


class Case:
    """A case of a seed.

    Attributes:
        stall: the longest time between two steps of a rank, in seconds.
    """

    def __init__(self, seed: int, directory: Path) -> None:
        self._seed, self._directory, self._rng = seed, directory, random.Random(seed)
        self.strikes = [self._rng.choice(["step", "placing", *_AFTER_A_LOSS]) for _ in range(self._rng.randint(1, 3))]
        if self.strikes[0] in _AFTER_A_LOSS:
            self.strikes.insert(0, "step")
        self.kills: list[str] = []
        self.stall = 0.0
        self._changed = threading.Condition()
        self._pending: str | None = None
        self._children: dict[int, Child] = {}
        self._findings: list[str] = []
        self._attempts = 0

    def _notice(self, child: Child, event: str) -> None:
        if event == self._pending:
            self._pending = "struck"  # until the strike has been made
            threading.Timer(self._rng.uniform(0, _MOST_STRIKE_DELAY), self._strike, [event]).start()
        with self._changed:
            self._changed.notify()

    def _strike(self, what: str) -> None:
        """Kills a rank, so that at least two ranks remain. If `what` is "joining", may kill a process that is still
        joining instead.
        """
        living = [each for each in self._children.values() if each.process.poll() is None and not each.killed]
        if sum(each.joined for each in living) <= 2:
            living = [each for each in living if not each.joined]
        if living:
            victim = self._rng.choice(living)
            self.kills.append(f"{victim.plan.number} in {what}")
            victim.strike()
            for child in self._children.values():
                child.whole_steps = 0
        self._pending = None

    def run(self) -> list[str]:
        """Runs the case, and returns its findings."""
        deadline = time.monotonic() + _CASE_SECONDS
        for number in range(RANKS):
            self._children[number] = Child(Plan(str(self._directory), self._seed, number), self._notice)
        strikes, stopped = list(self.strikes), False
        try:
            while not self._findings and not (stopped and not self._running()):
                with self._changed:
                    self._changed.wait(0.02)
                if time.monotonic() > deadline:
                    said = {number: (child.last, child.errors()) for number, child in self._children.items()}
                    return [f"the case did not end in time: strikes {self.strikes}, kills {self.kills}: {said}"]
                self._bury()
                whole = all(child.joined and child.whole_steps > _LAST_STEPS for child in self._children.values())
                if whole and self._pending in _AFTER_A_LOSS:  # the previous strike found no victim, or came too late
                    self._pending = None
                if self._pending is not None or not (whole or (strikes and strikes[0] in _AFTER_A_LOSS)):
                    continue
                if strikes and strikes[0] == "step":
                    time.sleep(self._rng.uniform(0, 0.3))
                    self._strike(strikes.pop(0))
                elif strikes:
                    self._pending = strikes.pop(0)
                elif not stopped:
                    write(self._directory / "stop", b"")
                    stopped = True
        finally:
            for child in self._children.values():
                child.process.kill()
                child.process.wait()
                child.reader.join()
                self.stall = max(self.stall, child.stall)
        return self._findings

    def _running(self) -> bool:
        return any(child.process.poll() is None for child in self._children.values())

    def _bury(self) -> None:
        """Judges processes that have ended, and replaces one if the others agree which ranks are lost."""
        dead = {n: child for n, child in self._children.items() if child.process.poll() is not None}
        for number, child in dead.items():
            status, may_end = child.process.returncode, child.killed or not child.joined
            if child.last.get("event") == "wrong" or status not in (0, 4, -signal.SIGKILL) or (status and not may_end):
                what = f"rank {number}, attempt {child.plan.attempt}, ended with {status}: {child.last}"
                self._findings.append(f"{what}: strikes {self.strikes}, kills {self.kills}: {child.errors()}")
        gone = {number: child for number, child in dead.items() if child.process.returncode != 0}
        living = [child for number, child in self._children.items() if number not in dead]
        joining = any(not child.joined for child in living)
        states = {json.dumps(child.state) for child in living}
        if not gone or joining or len(states) != 1 or living[0].state["lost"] != sorted(gone):
            return
        number = self._rng.choice(sorted(gone))
        self._attempts += 1
        lost = [each for each in sorted(gone) if each != number]
        plan = Plan(str(self._directory), self._seed, number, self._attempts, lost, living[0].state["placement"])
        write(self._directory / f"attempt-{self._attempts}", json.dumps(asdict(plan)).encode())
        self._children[number] = Child(plan, self._notice)


def run(seed: int) -> tuple[list[str], Case]:
    """Runs the case of a seed. Returns its findings and the case."""
    with tempfile.TemporaryDirectory() as directory:
        case = Case(seed, Path(directory))
        return [f"healing, seed {seed}: {finding}" for finding in case.run()], case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="cases to run")
    parser.add_argument("--seed", type=int, default=1, help="the first case's seed, which determines the case")
    parser.add_argument("--longest", type=float, help="seconds above which the time between two steps is a finding")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        return run_rank(Plan(**json.loads(options.rank)))
    findings, stalls, kills = [], [], 0
    for seed in range(options.seed, options.seed + options.count):
        found, case = run(seed)
        if options.longest is not None and case.stall > options.longest:
            found.append(f"healing, seed {seed}: {case.stall:.2f} s between two steps")
        findings += found
        stalls.append(case.stall)
        kills += len(case.kills)
        for finding in found:
            print(finding, flush=True)
    times = f"{statistics.median(stalls):.2f} s in the median case, {max(stalls):.2f} s at most"
    print(f"healing: {options.count} cases, {kills} kills, {len(findings)} findings", flush=True)
    print(f"healing: longest time between two steps: {times}", flush=True)
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
