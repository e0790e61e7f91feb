"""Runs a few cases of random work with faults. `make test-faults COUNT=1000` runs 1000 cases."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from support.faults import campaign as campaign_program
from support.faults.campaign import Campaign, kill_all, processes_of, run
from support.faults.case import FAULTS, Case
from support.faults.report import Outcome, Report
from support.processes import processes_with

pytestmark = [pytest.mark.slow, pytest.mark.host_only(reason="its ranks are on the host runtime")]

WITH_FAULTS = (
    "kill",
    "exit",
    "wrong arguments",
    "garbage",
    "fork",
    "signals",
    "full disk",
    "clock jumps",
    "daemon stopped",
)
# Faults that run only with --full: peers can't distinguish "exit" from a killed rank, and other tests cover "fork",
# "signals" and "full disk".
FURTHER = {"exit", "fork", "signals", "full disk"}
CASES = [
    pytest.param(Case.of(FAULTS.index(fault), brief=True), id=fault, marks=pytest.mark.full if fault in FURTHER else [])
    for fault in WITH_FAULTS
]


@pytest.mark.parametrize("case", CASES)
def test_every_rank_ends_in_time_by_name_and_the_rest_goes_on(case: Case, tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, cache=Path(os.environ["PROXYCCL_CACHE"]))
    if reason := campaign.why_not(case):
        pytest.skip(reason)
    assert campaign.run(case) == []


def test_a_seed_gives_the_same_case_again() -> None:
    assert [Case.of(seed) for seed in range(64)] == [Case.of(seed) for seed in range(64)]
    assert {Case.of(seed).fault for seed in range(64)} == set(FAULTS)


def test_a_case_finds_and_ends_only_its_own_processes() -> None:
    sleepers = [
        subprocess.Popen(["sleep", "60"], env={**os.environ, "PROXYCCL_FAULTS_CASE": mark}) for mark in ("7-1", "7-10")
    ]
    try:
        assert [list(processes_of(mark)) for mark in ("7-1", "7-10")] == [[each.pid] for each in sleepers]
        kill_all("7-1")
        assert sleepers[0].wait(30) == -signal.SIGKILL
        assert list(processes_of("7-10")) == [sleepers[1].pid]
    finally:
        for each in sleepers:
            each.kill()
            each.wait(30)


class Meeting(Campaign):
    """A campaign in which two cases must run concurrently; one case has a finding, one raises, and one can't be run."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._both = threading.Barrier(2)

    def why_not(self, case: Case) -> str:
        return "no such machine" if case.seed == 2 else ""

    def run(self, case: Case) -> list[str]:
        self._both.wait(60)
        if case.seed == 1:
            raise RuntimeError("no room")
        return ["rank 0 hangs\nat line 7"]


def test_cases_run_at_once_and_the_report_tells_each_end(tmp_path: Path) -> None:
    path = tmp_path / "report.txt"
    report = Report(path, 3, jobs=2)
    assert run(map(Case.of, range(3)), Meeting(tmp_path), report)
    text = path.read_text()
    assert text.startswith("2 of 3 cases ran, 2 with findings\n")
    assert f"left out: 1 {FAULTS[2]}: no such machine" in text
    assert "\n  rank 0 hangs\n    at line 7\n" in text
    assert "RuntimeError: no room" in text


def test_the_report_is_whole_after_every_case(tmp_path: Path) -> None:
    path = tmp_path / "report.txt"
    report = Report(path, 2, jobs=1)
    for seed, findings in enumerate(([], ["a wrong result"])):
        report.add(Outcome(Case.of(seed), 1.5, findings))
        text = path.read_text()
        assert text.startswith(f"{seed + 1} of 2 cases ran, {seed} with findings\n")
        assert all(str(each) in text for each in report.outcomes)


@pytest.mark.parametrize(
    ("variable", "fault", "reason"),
    [("CXX", "none", "need a C++ compiler"), ("CC", "clock jumps", "no C compiler absent")],
)
def test_a_case_that_lacks_a_compiler_is_left_out_by_name(
    variable: str, fault: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "absent")
    assert reason in Campaign(tmp_path).why_not(Case.of(0, fault))


def test_a_campaign_that_is_ended_leaves_no_process(tmp_path: Path) -> None:
    path = tmp_path / "report.txt"
    command = [sys.executable, campaign_program.__file__, "--count", "4", "--jobs", "2", "--faults", "none"]
    process = subprocess.Popen([*command, "--report", str(path)], stdout=subprocess.PIPE, text=True)
    marks = [f"{process.pid}-{seed}" for seed in range(1, 5)]
    deadline = time.monotonic() + 60
    while not any(map(processes_of, marks)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.terminate()
    output, _ = process.communicate(timeout=120)
    assert "of 4 cases ran" in output
    assert process.returncode == 1
    assert not any(processes_with("PROXYCCL_FAULTS_CASE", mark) for mark in marks)
