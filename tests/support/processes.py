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

import proxyccl


class FileBootstrap(proxyccl.FileBootstrap):
    """The bootstrap of a process that `run_processes` started."""

    @classmethod
    def from_environment(cls) -> FileBootstrap:
        """From its environment variables."""
        return cls(os.environ["RENDEZVOUS"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


@dataclass(frozen=True)
class Ended:
    """How one process ended."""

    returncode: int
    stdout: str
    stderr: str


def run_processes(
    world_size: int, program: Path, *arguments: str, timeout: float = 180.0, env: dict[str, str] | None = None
) -> list[Ended]:
    """Runs a program in `world_size` processes and waits for all. Raises TimeoutError, after ending all of them."""
    with tempfile.TemporaryDirectory() as rendezvous:
        shared = {**os.environ, **(env or {}), "RENDEZVOUS": rendezvous, "WORLD_SIZE": str(world_size)}
        processes = [
            subprocess.Popen(
                [sys.executable, str(program), *arguments],
                env={**shared, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        deadline = time.monotonic() + timeout
        try:
            outputs = [process.communicate(timeout=max(0.1, deadline - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"a process of {program.name} {arguments} hangs") from error
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return [Ended(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


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
