"""What the system says of a process on this machine, by its number."""

from __future__ import annotations

import signal
from pathlib import Path


def stat_of(path: Path) -> list[str]:
    """The fields of a process's or a thread's `stat` file behind its name, from the third of proc(5), the state, on.

    Raises:
        FileNotFoundError, ProcessLookupError: it is gone.
    """
    return path.read_text().rpartition(")")[2].split()


def start_of(pid: int) -> int | None:
    """When a process started, in ticks since the system did; None where there is none, or a zombie.

    With the number it names one process only: numbers are used again.
    """
    try:
        fields = stat_of(Path(f"/proc/{pid}/stat"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def is_stopped(pid: int) -> bool:
    """Whether there is such a process, and a signal has stopped it."""
    return _status(pid, "State").startswith("T")


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether there is such a process, and it has a handler for a signal."""
    return bool(int(_status(pid, "SigCgt") or "0", 16) >> (number - 1) & 1)


def _status(pid: int, name: str) -> str:
    """What /proc/PID/status has under a name; empty where there is no such process."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), "")
