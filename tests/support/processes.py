"""Ranks as plain processes, joined by files: for tests in which one dies and the others continue.

An MPI launcher ends the whole job when a rank dies. This one does not, and shows the least that a launcher must offer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import proxyccl
from support.devices import RUNTIME
from support.forked import ForkedProcess


class FileBootstrap(proxyccl.FileBootstrap):
    """The bootstrap of a process that `run_processes` started."""

    @classmethod
    def from_environment(cls) -> FileBootstrap:
        """From its environment variables."""
        return cls(os.environ["RENDEZVOUS"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


_KILLED_SECONDS = 60.0


@dataclass(frozen=True)
class Ended:
    """How one process ended."""

    returncode: int
    stdout: str
    stderr: str


def run_processes(
    world_size: int,
    program: Path,
    *arguments: str,
    timeout: float = 180.0,
    env: dict[str, str] | None = None,
    fresh: bool = RUNTIME == "cuda",
) -> list[Ended]:
    """Runs a program in `world_size` processes and waits for all. Raises TimeoutError, after ending all of them.

    Args:
        world_size: number of processes.
        program: a Python program.
        arguments: the program's.
        timeout: seconds for all.
        env: is added to this process's environment.
        fresh: start interpreters, for programs that are about these; otherwise they are forks (forked.py).
    """
    with tempfile.TemporaryDirectory() as directory:
        shared = {**os.environ, **(env or {}), "RENDEZVOUS": directory, "WORLD_SIZE": str(world_size)}
        outputs = [[Path(directory, f"{name}-{rank}") for name in ("out", "err")] for rank in range(world_size)]
        processes: list[subprocess.Popen[str] | ForkedProcess] = []
        deadline = time.monotonic() + timeout
        try:
            for rank, (stdout, stderr) in enumerate(outputs):
                with stdout.open("w") as out, stderr.open("w") as err:
                    processes.append(
                        started([str(program), *arguments], {**shared, "RANK": str(rank)}, out, err, fresh)
                    )
            for process in processes:
                process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"a process of {program.name} {arguments} hangs") from None
        finally:
            for process in processes:
                process.kill()
                process.wait(_KILLED_SECONDS)
        return [
            Ended(process.returncode, *(output.read_text(errors="replace") for output in written))
            for process, written in zip(processes, outputs, strict=True)
        ]


def started(
    command: list[str], env: dict[str, str], stdout: IO[str], stderr: IO[str], fresh: bool = RUNTIME == "cuda"
) -> subprocess.Popen[str] | ForkedProcess:
    """A process that runs a Python program with its arguments: with an interpreter of its own, or a fork."""
    if fresh:
        return subprocess.Popen([sys.executable, *command], env=env, stdout=stdout, stderr=stderr, text=True)
    return ForkedProcess(command, env, stdout, stderr)


def address_space() -> int:
    """The number of bytes of addresses that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")


def processes_with(variable: str, value: str) -> list[int]:
    """The processes of this machine that were started with an environment variable of this value."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if f"{variable}={value}" in _started(pid)]


def _started(pid: int) -> list[str]:
    """The environment that a process was started with; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def is_job_daemon(pid: int) -> bool:
    """Whether a process is a daemon that the ranks of a job started."""
    try:
        return b"job_main.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def shared_memory_names() -> set[str]:
    """The files in /dev/shm, except those that others put there in a test run.

    MPI keeps segments there, and leaves them when a rank is killed; so does the driver of a GPU.
    """
    others = ("mpich_shm_", "ucx_shm_posix_", "vader_segment", "sm_segment", "cuda.shm.")
    return {name for name in os.listdir("/dev/shm") if not name.startswith(others)}
