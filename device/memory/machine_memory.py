"""Finds the limits that the machine and control groups set on this process's memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Limit:
    """A limit on memory."""

    nbytes: int  # bytes of memory and swap space
    origin: str  # the start of a sentence on the limit, such as "this machine has"

    def __str__(self) -> str:
        return f"{self.origin} {self.nbytes} bytes of memory and swap space"


def memory_limit(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> Limit | None:
    """Returns the smallest limit, or None if the system, with its file systems in the two directories, reports none.

    The limit is on all memory, not only free memory, because pages are allocated when first touched, and other memory
    may be freed until then.
    """
    machine = _of_machine(proc)
    swap = machine.get("SwapTotal", 0)
    limits = [Limit(nbytes + swap, f"{path} allows") for path, nbytes in _group_limits(proc, groups)]
    if "MemTotal" in machine:
        limits.append(Limit(machine["MemTotal"] + swap, "this machine has"))
    return min(limits, key=lambda limit: limit.nbytes, default=None)


def free_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the bytes of memory and swap space that the machine could still give to processes, or the limit of the
    control groups if that is smaller. Returns 2**63 if the system does not report these numbers.
    """
    machine, limit = _of_machine(proc), memory_limit(proc, groups)
    left = [] if limit is None else [limit.nbytes]
    if "MemAvailable" in machine:
        left.append(machine["MemAvailable"] + machine.get("SwapFree", 0))
    return min(left, default=1 << 63)


def _of_machine(proc: Path) -> dict[str, int]:
    lines = re.findall(r"^(\w+): +(\d+) kB", _text(proc / "meminfo"), re.MULTILINE)
    return {name: int(kibibytes) << 10 for name, kibibytes in lines}


def _group_limits(proc: Path, groups: Path) -> list[tuple[Path, int]]:
    found = []
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            root, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container, /proc may show the group's path on the host, but the container's group is mounted at the root.
        inner = root / group.lstrip("/")
        for directory in (inner, *inner.parents):
            text = _text(directory / name).strip()
            if text.isdigit():  # cgroup v2 writes "max" for no limit
                found.append((directory / name, int(text)))
            if directory == root:
                break
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the system has no such file, or hides it
        return ""
