"""The report of a campaign: a file that is rewritten after every case."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from proxyccl.device.process.cpu import cpu_name
from support.faults.case import FAULTS, LINK_FAULTS, Case


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Attributes:
        seconds: the case's duration.
        findings: descriptions of the rules that the case violated.
    """

    case: Case
    seconds: float
    findings: list[str]

    def __str__(self) -> str:
        head = f"{self.case}: {'FOUND' if self.findings else 'ok'} in {self.seconds:.1f} s"
        return "\n".join([head, *("  " + each.replace("\n", "\n    ") for each in self.findings)])


def machine() -> str:
    """Returns a description of this machine."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE") / 1e9
    kernel = f"{platform.system()} {platform.release()}"
    cores = len(os.sched_getaffinity(0))
    return f"{cpu_name()}, {cores} cores, {memory:.0f} GB, {kernel}, Python {platform.python_version()}"


def commit() -> str:
    """Returns the checked-out commit, or "unknown"."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=7"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


@dataclass
class Report:
    """The outcomes of a campaign so far.

    Attributes:
        path: path of the report's file; None for no file.
        planned: number of cases to run.
        jobs: number of cases that run concurrently.
        outcomes: the outcomes of cases, in the order in which the cases ended.
        left_out: number of cases that could not run on this machine, by fault and reason.
    """

    path: Path | None
    planned: int
    jobs: int
    outcomes: list[Outcome] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    _machine: str = field(init=False, default_factory=machine)
    _commit: str = field(init=False, default_factory=commit)

    def add(self, outcome: Outcome) -> None:
        """Adds the outcome of a case, and prints it."""
        self.outcomes.append(outcome)
        print(outcome, flush=True)
        self._write()

    def leave_out(self, case: Case, reason: str) -> None:
        """Counts a case that can't be run on this machine."""
        self.left_out[f"{case.fault}: {reason}"] += 1
        self._write()

    @property
    def findings(self) -> list[Outcome]:
        """The outcomes with findings, ordered by seed."""
        return [each for each in self._by_seed() if each.findings]

    def summary(self) -> str:
        """Returns the head of the report."""
        kinds = Counter(each.case.fault for each in self.outcomes)
        faults = ", ".join(f"{kinds[fault]} {fault}" for fault in FAULTS + LINK_FAULTS if kinds[fault])
        seeds = ", ".join(str(each.case.seed) for each in self.findings)
        load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
        return "\n".join(
            [
                f"{len(self.outcomes)} of {self.planned} cases ran, {len(self.findings)} with findings",
                f"faults: {faults or 'none'}",
                f"seeds with findings: {seeds or 'none'}",
                *(f"left out: {count} {reason}" for reason, count in self.left_out.items()),
                f"commit: {self._commit}",
                f"machine: {self._machine}",
                f"cases at once: {self.jobs}; load average of 1, 5 and 15 minutes: {load}",
            ]
        )

    def _by_seed(self) -> list[Outcome]:
        return sorted(self.outcomes, key=lambda each: each.case.seed)

    def _write(self) -> None:
        if self.path is None:
            return
        parts = [
            self.summary(),
            *map(str, self.findings),
            "\n".join(str(each) for each in self._by_seed() if not each.findings),
        ]
        new = self.path.with_name(f".{self.path.name}")
        new.write_text("\n\n".join(parts) + "\n")
        new.replace(self.path)
