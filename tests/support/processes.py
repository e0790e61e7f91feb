"""Runs ranks as plain processes with a file bootstrap, for tests in which a rank dies and the other ranks continue.
With MPI, a rank's death would end the whole job.
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
        """Makes the bootstrap from the environment variables that `run_processes` set."""
        return cls(os.environ["RENDEZVOUS"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


_KILLED_SECONDS = 60.0


@dataclass(frozen=True)
class Ended:
    """The exit status and output of a process."""

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
    """Runs a program in `world_size` processes and waits for all processes. After the time-out, kills all processes and
    raises TimeoutError.

    Args:
        world_size: number of processes.
        program: a Python program.
        arguments: the program's arguments.
        timeout: seconds until all processes must have ended.
        env: environment variables in addition to those of this process.
        fresh: whether to start new interpreters instead of forks (forked.py).
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
    """Starts a Python program with its arguments, in a new interpreter or in a fork. Returns its process."""
    if fresh:
        return subprocess.Popen([sys.executable, *command], env=env, stdout=stdout, stderr=stderr, text=True)
    return ForkedProcess(command, env, stdout, stderr)


def address_space() -> int:
    """Returns the size in bytes of this process's mapped address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGESIZE")


def processes_with(variable: str, value: str) -> list[int]:
    """Returns the ids of this machine's processes that were started with this value of an environment variable."""
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if f"{variable}={value}" in _started(pid)]


def _started(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def is_job_daemon(pid: int) -> bool:
    """Returns whether a process is a job's daemon, started by a rank."""
    try:
        return b"job_main.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def shared_memory_names() -> set[str]:
    """Returns the names of the files in /dev/shm, except those of MPI and GPU drivers, which leak files when a rank is
    killed.
    """
    others = ("mpich_shm_", "ucx_shm_posix_", "vader_segment", "sm_segment", "cuda.shm.")
    return {name for name in os.listdir("/dev/shm") if not name.startswith(others)}
