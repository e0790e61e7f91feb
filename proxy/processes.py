"""Reads information about a process from /proc, and parses lists of cores."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from pathlib import Path

from proxyccl.device.errors import ArgumentError

_NODES = Path("/sys/devices/system/node")
_DIGITS = 5  # a core's number has at most this many digits


def stat_of(path: Path) -> list[str]:
    """Returns the fields of a process's or a thread's `stat` file (proc(5)), beginning with the third field, the state.

    Raises:
        FileNotFoundError, ProcessLookupError: the process has ended.
    """
    return path.read_text().rpartition(")")[2].split()


def start_of(pid: int, *, zombies: bool = False) -> int | None:
    """Returns the start time of a process, in ticks since the system's start, or None if there is no such process. If
    `zombies` is False, also returns None for a process whose main thread has ended, although its other threads may run.

    The process id and the start time together identify one process, because the system reuses ids.
    """
    try:
        fields = stat_of(Path(f"/proc/{pid}/stat"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") and not zombies else int(fields[19])


def cpu_time_of(pid: int, thread: int) -> int | None:
    """Returns the CPU time that a thread of a process has taken, in ns; None if the system does not report the time."""
    task = Path(f"/proc/{pid}/task/{thread}")
    try:
        return int((task / "schedstat").read_text().split()[0])
    except (OSError, ValueError, IndexError):  # a kernel may lack schedstat; the code below reads stat instead
        pass
    try:
        user, system = stat_of(task / "stat")[11:13]
    except (OSError, ValueError):
        return None
    return (int(user) + int(system)) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def process_name(pid: int | None) -> str:
    """Returns a name, for messages, of the process at a socket's other end. `pid` is 0 or None if the process has no id
    in this PID namespace.
    """
    return f"process {pid}" if pid else "a process of another PID namespace"


def is_stopped(pid: int) -> bool:
    """Whether a process exists and is stopped by a signal."""
    return _status(pid, "State").startswith("T")


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process exists and has a handler for a signal."""
    return bool(int(_status(pid, "SigCgt") or "0", 16) >> (number - 1) & 1)


def _status(pid: int, name: str) -> str:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), "")


def parse_cores(text: str, near: int | None = None) -> list[int]:
    """Parses a list of cores. Returns the cores' numbers in ascending order.

    Args:
        text: numbers and ranges, such as ``0-3,8``; ``node:1`` for the cores of a NUMA node; ``near`` for the cores of
            the node `near`.
        near: the NUMA node next to the device; None if there is no device, or its node is unknown.

    Raises:
        ArgumentError: the text is not a valid list of cores.
    """
    if text == "near":
        if near is None:
            raise ArgumentError("cores", "no NUMA node is known to be near; name the cores, or node:NUMBER")
        text = f"node:{near}"
    if text.startswith("node:"):
        listed = _NODES / f"node{text.removeprefix('node:')}" / "cpulist"
        try:
            text = listed.read_text().strip()
        except OSError:
            raise ArgumentError("cores", f"this machine has no NUMA node {text.removeprefix('node:')!r}") from None
    cores: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        if not all(end.isdecimal() and len(end) <= _DIGITS for end in ends) or int(ends[0]) > int(ends[1]):
            raise ArgumentError("cores", f"{part!r} is neither a core's number nor a range such as 0-3")
        cores.update(range(int(ends[0]), int(ends[1]) + 1))
    return sorted(cores)


def encode_cores(cores: Iterable[int]) -> str:
    """Encodes cores as text for `decode_cores`."""
    return f"{sum(1 << core for core in set(cores)):x}"


def decode_cores(text: str) -> set[int]:
    """Decodes a text that `encode_cores` returned. Raises ValueError for any other text."""
    mask = int(text or "0", 16)
    return {core for core in range(mask.bit_length()) if mask >> core & 1}


def cores_of(pid: int) -> set[int]:
    """Returns the cores that a process of this machine may run on; an empty set if the process has ended or is not
    visible in this PID namespace.
    """
    try:
        return os.sched_getaffinity(pid)
    except ProcessLookupError:
        return set()
