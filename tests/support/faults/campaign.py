"""Runs fault-injection cases and checks how each case ended.

python tests/support/faults/campaign.py --count 1000 --seed 1 --report FILE

--hosts puts the ranks on two hosts, which are network namespaces of this machine, and adds faults of the link between
the hosts. --jobs sets how many cases run concurrently. SIGTERM and Ctrl-C end the campaign and its running cases; the
report then lists only the cases that ended before.

A case has a finding if a process does not end in time or ends without a named error, a rank does not notice a stopped
daemon within two time-outs, a result is wrong, ranks disagree about which ranks continue, a rank notices a harmless
fault, or a process, descriptor or file is leaked.
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
import traceback
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from support.faults.case import FAULTS, HARMLESS, LASTING_DESCRIPTORS, LINK_FAULTS, Case
from support.faults.report import Outcome, Report
from support.faults.surroundings import Surroundings
from support.hosts.networks import Hosts
from support.processes import processes_with

_RANK = Path(__file__).parent / "rank.py"
_SETTLES_SECONDS = 10.0
_DIES_SECONDS = 5.0
_NOTICES_SECONDS = 10.0
"""Extra time, for busy machines, beyond the two time-outs in which ranks must notice a stopped daemon."""
_MARK = "PROXYCCL_FAULTS_CASE"
_MOST_OUTPUT = 12_000
"""Number of last characters that a finding shows of a rank's errors and of a report."""


@dataclass
class Rank:
    """A rank's process and its output."""

    process: subprocess.Popen[str]
    events: list[dict[str, Any]] = field(default_factory=list)
    errors: str = ""
    ready: threading.Event = field(default_factory=threading.Event)
    hung: bool = False

    def read(self) -> None:
        """Reads the process's output to the end, in a separate thread."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))
            self.ready.set()
        self.ready.set()

    def errors_said(self) -> str:
        """Returns the errors that the rank's process has reported, in order."""
        met = [each for each in self.events if each["event"] in ("error", "ended")]
        return "; ".join(f"{each['kind']}: {each['message']}" for each in met) or "no error"

    def said(self, event: str) -> dict[str, Any] | None:
        """Returns the process's last event of this kind, or None if there was none."""
        return next((each for each in reversed(self.events) if each["event"] == event), None)


def processes_of(mark: str) -> dict[int, str]:
    """Returns the processes whose environment variable `_MARK` has this value, with their command lines."""
    found = {}
    for pid in processes_with(_MARK, mark):
        with contextlib.suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def kill_all(mark: str) -> None:
    """Kills the processes whose environment variable `_MARK` has this value."""
    for pid in processes_of(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def where_threads_wait(pid: int) -> str:
    """Describes a process's threads from /proc: state, kernel wait channel and system call."""
    lines = []
    for task in sorted(Path(f"/proc/{pid}/task").glob("*")):
        words = []
        for name in ("comm", "wchan", "syscall"):
            with contextlib.suppress(OSError):
                words.append(f"{name} {(task / name).read_text().strip()}")
        with contextlib.suppress(OSError):
            words.append(f"state {(task / 'stat').read_text().rpartition(')')[2].split()[0]}")
        lines.append(f"thread {task.name}: {', '.join(words)}")
    return "\n".join(lines)


def shared_memory() -> set[str]:
    """Returns the names of ProxyCCL's files in /dev/shm. The library should make no such file, so a new file is a
    finding.
    """
    return {path.name for path in Path("/dev/shm").glob("*proxyccl*")}


class Campaign:
    """Runs cases, on several threads concurrently if needed.

    Args:
        directory: directory for the cases' reports and, unless `cache` is given, their kernels.
        hosts: the two hosts of cases with ranks on two hosts.
        cache: directory of compiled kernels, shared by all cases because compiling takes seconds.
    """

    def __init__(self, directory: Path, hosts: Hosts | None = None, *, cache: Path | None = None) -> None:
        self._directory = directory
        self._cache = cache or directory / "cache"
        self._surroundings = Surroundings(directory, hosts)
        self._lock = threading.Lock()
        self._shared_memory = shared_memory()
        self._running: set[str] = set()
        self._stopped = threading.Event()

    def why_not(self, case: Case) -> str:
        """Returns why a case can't be run on this machine, or ""."""
        return self._surroundings.why_not(case)

    def stop(self) -> None:
        """Ends the running cases. Interrupted calls of `run` return meaningless findings."""
        self._stopped.set()
        while True:
            with self._lock:
                running = set(self._running)
            if not running:
                return
            for mark in running:  # the outer loop repeats, because a rank may be about to start
                kill_all(mark)
            time.sleep(0.05)

    def run(self, case: Case) -> list[str]:
        """Runs a case. Returns its findings."""
        mark = f"{os.getpid()}-{case.seed}"
        with self._lock:
            self._running.add(mark)
        try:
            return self._run(case, mark)
        finally:
            kill_all(mark)
            with self._lock:
                self._running.remove(mark)

    def _run(self, case: Case, mark: str) -> list[str]:
        here = self._directory / f"case-{case.seed}"
        here.mkdir(parents=True)
        runtime_directory = here / "run"
        runtime_directory.mkdir(mode=0o700)
        environment = {
            **os.environ,
            "PROXYCCL_RUNTIME": "host",
            "PROXYCCL_CACHE": str(self._cache),
            "PROXYCCL_REPORT_DIR": str(here / "reports"),
            "XDG_RUNTIME_DIR": str(runtime_directory),
            "RENDEZVOUS": str(here / "rendezvous"),
            "WORLD_SIZE": str(case.ranks),
            "PYTHONFAULTHANDLER": "1",
            _MARK: mark,
        }
        ranks = [self._start(case, rank, environment, here) for rank in range(case.ranks)]
        readers = [threading.Thread(target=rank.read, daemon=True) for rank in ranks]
        for reader in readers:
            reader.start()
        deadline = time.monotonic() + case.bound
        for rank in ranks:
            rank.ready.wait(max(0, deadline - time.monotonic()))
        self._stopped.wait(case.delay)
        with self._surroundings.link_fault(case):
            findings = self._strike(case, ranks)
            findings += self._await_end(ranks, deadline)
        for number, reader in enumerate(readers):
            reader.join(_SETTLES_SECONDS)  # a leaked process may hold the pipe open
            ranks[number].errors = (here / f"stderr-{number}").read_text(errors="replace")
        findings += self._judge(case, ranks)
        findings += self._leavings(mark)
        if findings:
            findings += [
                f"rank {number} said: {rank.events}\n{rank.errors[-_MOST_OUTPUT:]}" for number, rank in enumerate(ranks)
            ]
            reports = sorted((here / "reports").glob("*"))
            findings += [f"report {each.name}: {each.read_text(errors='replace')[-_MOST_OUTPUT:]}" for each in reports]
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

    def _strike(self, case: Case, ranks: list[Rank]) -> list[str]:
        """Applies a fault by signals to the victim or to its daemon. Returns findings."""
        victim = ranks[case.victim].process.pid
        daemon = (ranks[case.victim].said("ready") or {}).get("daemon")
        strikes = {
            "kill": (victim, [signal.SIGKILL], 0.0),
            "stop": (victim, [signal.SIGSTOP, signal.SIGCONT], 3 * case.timeout),
            "pause": (victim, [signal.SIGSTOP, signal.SIGCONT], case.timeout / 6),
            "daemon killed": (daemon, [signal.SIGKILL], 0.0),
            "daemon stopped": (daemon, [signal.SIGSTOP, signal.SIGKILL], 0.0),
        }
        findings: list[str] = []
        if case.fault not in strikes:
            return findings
        target, signals, pause = strikes[case.fault]
        for i, number in enumerate(signals):
            if i > 0 and case.fault == "daemon stopped" and daemon is not None:
                findings = self._await_notice(case, ranks)  # before SIGKILL, whose effect ranks notice at once
            elif i > 0:
                self._stopped.wait(pause)
            if target is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(target, number)
        return findings

    def _await_notice(self, case: Case, ranks: list[Rank]) -> list[str]:
        """Waits until every rank has reported an error, or has finished without needing the stopped daemon. Returns
        findings.
        """
        deadline = time.monotonic() + 2 * case.timeout + _NOTICES_SECONDS
        while unaware := [
            number
            for number, rank in enumerate(ranks)
            if rank.process.poll() is None and not (rank.said("error") or rank.said("done"))
        ]:
            if time.monotonic() > deadline:
                return [
                    f"rank {number} did not notice within two time-outs that the daemon is stopped\n"
                    f"{where_threads_wait(ranks[number].process.pid)}"
                    for number in unaware
                ]
            if self._stopped.wait(0.05):
                break
        return []

    @staticmethod
    def _await_end(ranks: list[Rank], deadline: float) -> list[str]:
        findings = []
        for number, rank in enumerate(ranks):
            try:
                rank.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                findings.append(f"rank {number} did not end in time\n{where_threads_wait(rank.process.pid)}")
                rank.hung = True
                rank.process.send_signal(signal.SIGABRT)  # makes the rank print its threads' stacks
                try:
                    rank.process.wait(_DIES_SECONDS)
                except subprocess.TimeoutExpired:
                    rank.process.kill()
                    rank.process.wait(_DIES_SECONDS)
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
                findings.append(f"rank {number} ended with {status}")
            if case.fault in HARMLESS and (error := rank.said("error")):
                findings.append(f"rank {number} noticed a harmless fault: {error['kind']}: {error['message']}")
            if went_on := rank.said("went on"):
                groups.add(tuple(went_on["members"]))
            if (
                case.fault != "few descriptors"
                and (seen := rank.said("descriptors"))
                and (seen["after"] > seen["before"] + LASTING_DESCRIPTORS)
            ):
                what = ", ".join(filter(None, seen["open"]))
                counts = f"rank {number} had {seen['before']} descriptors and has {seen['after']}: {what}"
                findings.append(f"{counts}; it met {rank.errors_said()}")
            if "Traceback" in rank.errors and "PlannedError" not in rank.errors and status == 0:
                findings.append(f"rank {number} printed a traceback")
        members = [member for group in groups for member in group]
        if len(set(members)) != len(members):
            findings.append(f"ranks disagree who goes on: {sorted(groups)}")
        return findings

    def _leavings(self, mark: str) -> list[str]:
        deadline = time.monotonic() + _SETTLES_SECONDS
        while True:
            found = [
                f"process {pid} is left: {what}\n{where_threads_wait(pid)}" for pid, what in processes_of(mark).items()
            ]
            with self._lock:
                names = shared_memory() - self._shared_memory
                late = time.monotonic() > deadline
                if late:
                    self._shared_memory |= names  # keeps other cases from reporting these names
            found += [f"shared memory is left, by this case or one beside it: {name}" for name in names]
            if not found or late:
                return found
            time.sleep(0.05)


def run(cases: Iterable[Case], campaign: Campaign, report: Report) -> bool:
    """Runs cases, `report.jobs` of them concurrently, and adds their outcomes to the report. Returns False if the
    campaign was ended early.
    """

    def outcome(case: Case) -> Outcome:
        began = time.monotonic()
        try:
            findings = campaign.run(case)
        except Exception:  # lets the other cases continue
            findings = [f"the campaign failed: {traceback.format_exc()}"]
        return Outcome(case, time.monotonic() - began, findings)

    ended = False
    with ThreadPoolExecutor(report.jobs) as pool:
        try:
            futures = []
            for case in cases:
                if reason := campaign.why_not(case):
                    report.leave_out(case, reason)
                else:
                    futures.append(pool.submit(outcome, case))
            for future in as_completed(futures):
                report.add(future.result())
        except KeyboardInterrupt:
            ended = True
            pool.shutdown(wait=False, cancel_futures=True)
            campaign.stop()
    print(report.summary(), flush=True)
    return not ended


def _end(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="cases to run")
    parser.add_argument("--seed", type=int, default=1, help="the first one's; a case follows from its seed")
    parser.add_argument("--report", type=Path, help="a file that has the results after every case")
    parser.add_argument("--jobs", type=int, default=1, help="cases that run at once")
    parser.add_argument("--hosts", action="store_true", help="put the ranks on two hosts")
    parser.add_argument("--faults", nargs="+", choices=FAULTS + LINK_FAULTS, help="these in turn instead of all")
    arguments = parser.parse_args()
    hosts = arguments.hosts
    if hosts and arguments.jobs > 1:
        parser.error("--hosts: all cases have the same link, so one runs after another")
    signal.signal(signal.SIGTERM, _end)
    report = Report(arguments.report, arguments.count, arguments.jobs)
    with tempfile.TemporaryDirectory() as directory, Hosts(2) if hosts else contextlib.nullcontext() as made:
        seeds = range(arguments.seed, arguments.seed + arguments.count)
        faults = arguments.faults or [None]
        cases = (Case.of(seed, faults[seed % len(faults)], hosts=hosts) for seed in seeds)
        all_ran = run(cases, Campaign(Path(directory), made), report)
    return int(bool(report.findings) or not all_ran)


if __name__ == "__main__":
    sys.exit(main())
