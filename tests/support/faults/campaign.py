"""Runs cases and checks how each ended. python tests/support/faults/campaign.py --count 1000 --seed 1 --report FILE

With --hosts the ranks are on two hosts, which are network namespaces of this machine, and their link has faults too.

A finding is a process that did not end in time or ended by what has no name, a wrong result, ranks that disagree who
goes on, a harmless fault that somebody noticed, or something that is left behind: a process, a descriptor, a file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from support.faults.case import FAULTS, HARMLESS, LINK_FAULTS, Case
from support.faults.surroundings import Surroundings
from support.networks import Hosts

_RANK = Path(__file__).parent / "rank.py"
_SETTLES_SECONDS = 10.0
_MARK = "PROXYCCL_FAULTS_CASE"
_LASTING_DESCRIPTORS = 1
"""That a process keeps from its first communicator on: what wakes the thread that reports on a signal."""


@dataclass
class Rank:
    """A process and what it said."""

    process: subprocess.Popen[str]
    events: list[dict[str, Any]] = field(default_factory=list)
    errors: str = ""
    ready: threading.Event = field(default_factory=threading.Event)
    hung: bool = False

    def read(self) -> None:
        """Reads its output to the end, in a thread."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))
            self.ready.set()
        self.ready.set()

    def errors_said(self) -> str:
        """The errors that it met, in order."""
        met = [each for each in self.events if each["event"] in ("error", "ended")]
        return "; ".join(f"{each['kind']}: {each['message']}" for each in met) or "no error"

    def said(self, event: str) -> dict[str, Any] | None:
        """The last such event."""
        return next((each for each in reversed(self.events) if each["event"] == event), None)


def processes_of(mark: str) -> dict[int, str]:
    """Processes that were started with this mark, and what each is."""
    found = {}
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if path.name.isdigit() and f"{_MARK}={mark}".encode() in (path / "environ").read_bytes():
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def shared_memory() -> set[str]:
    """Names of shared memory."""
    return {path.name for path in Path("/dev/shm").glob("*proxyccl*")}


class Campaign:
    """Runs cases one after another.

    Args:
        directory: for what the cases leave: reports and caches. The cache is shared, as compiling takes seconds.
        hosts: two hosts for cases on hosts.
    """

    def __init__(self, directory: Path, hosts: Hosts | None = None) -> None:
        self._directory = directory
        self._surroundings = Surroundings(directory, hosts)

    def why_not(self, case: Case) -> str:
        """Why a case can't be run on this machine, or ""."""
        return self._surroundings.why_not(case)

    def run(self, case: Case) -> list[str]:
        """Runs a case. Returns its findings."""
        here = self._directory / f"case-{case.seed}"
        here.mkdir(parents=True)
        runtime_directory = here / "run"
        runtime_directory.mkdir(mode=0o700)
        mark, before = f"{os.getpid()}-{case.seed}", shared_memory()
        environment = {
            **os.environ,
            "PROXYCCL_RUNTIME": "host",
            "PROXYCCL_CACHE": str(self._directory / "cache"),
            "PROXYCCL_REPORT_DIR": str(here / "reports"),
            "XDG_RUNTIME_DIR": str(runtime_directory),
            "RENDEZVOUS": str(here / "rendezvous"),
            "WORLD_SIZE": str(case.ranks),
            "PYTHONFAULTHANDLER": "1",
            _MARK: mark,
        }
        ranks = [self._start(case, rank, environment, here) for rank in range(case.ranks)]
        readers = [threading.Thread(target=rank.read) for rank in ranks]
        for reader in readers:
            reader.start()
        deadline = time.monotonic() + case.bound
        for rank in ranks:
            rank.ready.wait(max(0, deadline - time.monotonic()))
        time.sleep(case.delay)
        with self._surroundings.link_fault(case):
            self._strike(case, ranks)
            findings = self._await_end(ranks, deadline)
        for number, reader in enumerate(readers):
            reader.join()
            ranks[number].errors = (here / f"stderr-{number}").read_text(errors="replace")
        findings += self._judge(case, ranks)
        findings += self._leavings(mark, before, runtime_directory)
        return findings

    def _start(self, case: Case, rank: int, environment: dict[str, str], here: Path) -> Rank:
        with (here / f"stderr-{rank}").open("w") as errors:
            process = subprocess.Popen(
                self._surroundings.command(case, rank, [str(_RANK), *case.arguments], here),
                env={**environment, **self._surroundings.environment(case, rank, here), "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        return Rank(process)

    @staticmethod
    def _strike(case: Case, ranks: list[Rank]) -> None:
        """What happens to the victim, or to its daemon, from outside."""
        victim = ranks[case.victim].process.pid
        daemon = (ranks[case.victim].said("ready") or {}).get("daemon")
        strikes = {
            "kill": (victim, [signal.SIGKILL], 0.0),
            "stop": (victim, [signal.SIGSTOP, signal.SIGCONT], 3 * case.timeout),
            "pause": (victim, [signal.SIGSTOP, signal.SIGCONT], case.timeout / 6),
            "daemon killed": (daemon, [signal.SIGKILL], 0.0),
            "daemon stopped": (daemon, [signal.SIGSTOP, signal.SIGKILL], 3 * case.timeout),
        }
        if case.fault not in strikes:
            return
        target, signals, pause = strikes[case.fault]
        for i, number in enumerate(signals):
            if i > 0:
                time.sleep(pause)
            if target is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(target, number)

    @staticmethod
    def _await_end(ranks: list[Rank], deadline: float) -> list[str]:
        findings = []
        for number, rank in enumerate(ranks):
            try:
                rank.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                findings.append(f"rank {number} did not end in time")
                rank.hung = True
                rank.process.send_signal(signal.SIGABRT)  # it shows where its threads are
                try:
                    rank.process.wait(5)
                except subprocess.TimeoutExpired:
                    rank.process.kill()
        return findings

    @staticmethod
    def _judge(case: Case, ranks: list[Rank]) -> list[str]:
        findings = []
        groups = set()
        for number, rank in enumerate(ranks):
            status, is_victim = rank.process.returncode, number == case.victim
            may_end_badly = is_victim and case.fault in (
                "kill",
                "exit",
                "exception",
                "few descriptors",
                "little memory",
            )
            if wrong := rank.said("wrong"):
                findings.append(f"rank {number}: a wrong result: {wrong['message']}")
            elif status != 0 and (rank.hung or not may_end_badly):
                findings.append(f"rank {number} ended with {status}: {rank.errors[-3000:]}")
            if case.fault in HARMLESS and (error := rank.said("error")):
                findings.append(f"rank {number} noticed a harmless fault: {error['kind']}: {error['message']}")
            if went_on := rank.said("went on"):
                groups.add(tuple(went_on["members"]))
            if (
                case.fault != "few descriptors"
                and (seen := rank.said("descriptors"))
                and (seen["after"] > seen["before"] + _LASTING_DESCRIPTORS)
            ):
                what = ", ".join(filter(None, seen["open"]))
                counts = f"rank {number} had {seen['before']} descriptors and has {seen['after']}: {what}"
                findings.append(f"{counts}; it met {rank.errors_said()}")
            if "Traceback" in rank.errors and "PlannedError" not in rank.errors and status == 0:
                findings.append(f"rank {number} printed a traceback: {rank.errors[-3000:]}")
        members = [member for group in groups for member in group]
        if len(set(members)) != len(members):
            findings.append(f"ranks disagree who goes on: {sorted(groups)}")
        return findings

    @staticmethod
    def _leavings(mark: str, shared_before: set[str], runtime_directory: Path) -> list[str]:
        deadline = time.monotonic() + _SETTLES_SECONDS
        while True:
            found = [f"process {pid} is left: {what}" for pid, what in processes_of(mark).items()]
            found += [f"shared memory is left: {name}" for name in shared_memory() - shared_before]
            if not found or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        for pid in processes_of(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return found


def run(cases: Iterable[Case], campaign: Campaign, report: Path | None = None) -> dict[str, list[str]]:
    """Runs cases, and shows each. Returns the findings by case."""
    findings, kinds, left_out = {}, Counter[str](), Counter[str]()
    for case in cases:
        if reason := campaign.why_not(case):
            left_out[f"{case.fault}: {reason}"] += 1
            continue
        began = time.monotonic()
        found = campaign.run(case)
        kinds[case.fault] += 1
        lines = [f"{case}: {'FOUND' if found else 'ok'} in {time.monotonic() - began:.1f} s", *found]
        print(*lines, sep="\n  ", flush=True)
        if report is not None:
            with report.open("a") as file:
                print(*lines, sep="\n  ", file=file)
        if found:
            findings[str(case)] = found
    print(f"{kinds.total()} cases, {len(findings)} with findings", *findings, sep="\n  ")
    print(", ".join(f"{kinds[fault]} {fault}" for fault in FAULTS + LINK_FAULTS if kinds[fault]))
    for reason, count in left_out.items():
        print(f"{count} left out: {reason}")
    return findings


def main() -> int:
    """The command line. Returns 1 if there are findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="cases to run")
    parser.add_argument("--seed", type=int, default=1, help="the first one's; a case follows from its seed")
    parser.add_argument("--report", type=Path, help="a file to add the results to")
    parser.add_argument("--hosts", action="store_true", help="put the ranks on two hosts")
    parser.add_argument("--faults", nargs="+", choices=FAULTS + LINK_FAULTS, help="these in turn instead of all")
    arguments = parser.parse_args()
    hosts = arguments.hosts
    with tempfile.TemporaryDirectory() as directory, Hosts(2) if hosts else contextlib.nullcontext() as made:
        seeds = range(arguments.seed, arguments.seed + arguments.count)
        faults = arguments.faults or [None]
        cases = (Case.of(seed, faults[seed % len(faults)], hosts=hosts) for seed in seeds)
        return int(bool(run(cases, Campaign(Path(directory), made), arguments.report)))


if __name__ == "__main__":
    sys.exit(main())
