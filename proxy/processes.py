"""The system's data about a process on this machine, by its process id."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def stat_of(path: Path) -> list[str]:
    """The fields of a process's or a thread's `stat` file (proc(5)), beginning with the third, the state.

    Raises:
        FileNotFoundError, ProcessLookupError: the process has ended.
    """
    return path.read_text().rpartition(")")[2].split()


def start_of(pid: int, *, zombies: bool = False) -> int | None:
    """When a process started, in ticks since the system's start; None if there is no such process. Without `zombies`
    also None for a process whose first thread has ended, although other threads may still run.

    Together with the process id it identifies one process: the system reuses ids.
    """
    try:
        fields = stat_of(Path(f"/proc/{pid}/stat"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") and not zombies else int(fields[19])


def cpu_time_of(pid: int, thread: int) -> int | None:
    """The CPU time that a thread of a process has taken, in ns; None if the system does not report the time."""
    task = Path(f"/proc/{pid}/task/{thread}")
    try:
        return int((task / "schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not every kernel has schedstat
        pass
    try:
        user, system = stat_of(task / "stat")[11:13]
    except (OSError, ValueError):
        return None
    return (int(user) + int(system)) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def process_name(pid: int | None) -> str:
    """How messages name the process at a socket's other end, which may have no number in this PID namespace."""
    return f"process {pid}" if pid else "a process of another PID namespace"


def is_stopped(pid: int) -> bool:
    """Whether a process exists and is stopped by a signal."""
    return _status(pid, "State").startswith("T")


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process exists and has a handler for a signal."""
    return bool(int(_status(pid, "SigCgt") or "0", 16) >> (number - 1) & 1)


def _status(pid: int, name: str) -> str:
    """A field of /proc/PID/status; empty if there is no such process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), "")
