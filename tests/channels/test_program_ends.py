"""If a program ends with a nonzero status while a communicator is open, peers get an error."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from proxyccl.channels.liveness import program_end
from support.paths import TESTS
from support.processes import run_processes
from support.running import run_mpi

PROGRAM = TESTS / "support" / "programs" / "ends.py"


@pytest.mark.parametrize(("how", "status"), [("sys.exit", 3), ("exit", 1)])
def test_peers_hear_of_an_exit_with_a_status(how: str, status: int) -> None:
    survivor, victim = run_processes(2, PROGRAM, how, fresh=True)
    assert victim.returncode == status, victim.stderr
    assert "AbortedError: rank 1" in survivor.stdout, survivor.stdout + survivor.stderr
    assert "after no time" in survivor.stdout


@pytest.mark.parametrize(("how", "status"), [("raise", 3), ("idiom", 0)])
def test_a_call_after_a_peers_end_is_refused(how: str, status: int) -> None:
    """The peer's exit status does not matter, because Python does not report the status of a SystemExit."""
    survivor, victim = run_processes(2, PROGRAM, how, fresh=True)
    assert victim.returncode == status, victim.stderr
    assert "MismatchError" in survivor.stdout, survivor.stdout + survivor.stderr
    assert "rank 1 has closed the communicator or ended its program" in survivor.stdout
    assert "after no time" in survivor.stdout


def test_an_exit_that_the_program_catches_is_not_its_end() -> None:
    survivor, other = run_processes(2, PROGRAM, "caught", fresh=True)
    assert other.returncode == 0, other.stderr
    assert "caught" in other.stdout
    assert survivor.stdout == "after no time\n", survivor.stderr


def test_peers_hear_of_a_system_exit_under_mpi4py() -> None:
    assert "AbortedError: rank 1" in run_mpi(2, PROGRAM, "raise").stdout


def test_an_exit_in_another_thread_ends_that_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda arguments: raised.append(arguments.exc_type))
    program_end.watch()
    thread = threading.Thread(target=sys.exit, args=(3,))
    thread.start()
    thread.join()
    assert not program_end.failure()
    assert raised == [SystemExit]  # the library's hook calls the program's hook


FORKS = """
import os, sys, threading
from proxyccl.channels.liveness import program_end

def fork():
    if (child := os.fork()) == 0:
        sys.exit(3)
    os.waitpid(child, 0)

program_end.watch()
thread = threading.Thread(target=fork)
thread.start()
thread.join()
"""


def test_an_exit_in_a_fork_by_another_thread_is_quiet() -> None:
    """The program uses no GPU driver, because a driver might wait forever at the exit of a forked process."""
    command = [sys.executable, "-W", "ignore", "-c", FORKS]  # Python 3.12 warns of a fork in a process with threads
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
