"""Counts the CPU cores that this process may use."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path, PurePosixPath

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def usable_cores(cores: int | None = None) -> int:
    """Returns the smaller of `cores` and the number of cores that control groups allow this process; at least 1.
    `cores` is a number of cores; None for all cores of the machine.
    """
    allowed = cores_allowed()
    found = cores if cores is not None else os.cpu_count() or 1
    return found if allowed is None else max(1, min(found, math.floor(allowed)))


def core_share(host_ranks: int, container_ranks: int) -> int:
    """Returns an equal share, per rank, of the machine's cores or of the cores that control groups allow, whichever
    share is smaller; at least 1.

    Args:
        host_ranks: the number of ranks on the machine.
        container_ranks: the number of ranks in this process's container, which share its control group's limit.
    """
    share, allowed = (os.cpu_count() or 1) // host_ranks, cores_allowed()
    return max(1, share if allowed is None else min(share, math.floor(allowed) // container_ranks))


def cores_allowed(root: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> float | None:
    """Returns the number of cores that control groups (CPU quotas, cpusets) allow; None if no limit can be read.

    Args:
        root: the directory at which control groups are mounted.
        own: the file that names the process's control groups.
    """
    limits = []
    with contextlib.suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                groups = _upwards(root, path)
                limits += [*map(_limit, groups), _cores_of(groups[0] / "cpuset.cpus.effective")]
            elif "cpu" in controllers.split(","):
                limits += [_old_limit(directory) for directory in _upwards(root / controllers, path)]
            elif "cpuset" in controllers.split(","):
                limits.append(_cores_of(_upwards(root / controllers, path)[0] / "cpuset.effective_cpus"))
    return min((limit for limit in limits if limit is not None), default=None)


def _upwards(mounted: Path, path: str) -> list[Path]:
    group = PurePosixPath(path).relative_to("/")
    return [mounted / group, *(mounted / parent for parent in group.parents)]


def _limit(directory: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (directory / "cpu.max").read_text().split()
        return int(quota) / int(period)  # int("max"), for no limit, raises ValueError
    return None


def _old_limit(directory: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota = int((directory / "cpu.cfs_quota_us").read_text())
        return quota / int((directory / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    return None


def _cores_of(effective: Path) -> int | None:
    """Returns the number of cores in a file such as "0-3,8"."""
    with contextlib.suppress(OSError, ValueError):
        bounds = [part.split("-") for part in effective.read_text().strip().split(",")]
        return sum(int(bound[-1]) - int(bound[0]) + 1 for bound in bounds)
    return None
