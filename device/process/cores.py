"""The cores that a process's threads may use, by the machine and the control groups."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path, PurePosixPath

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def usable_cores(cores: int | None = None) -> int:
    """Returns the number of cores that this process may use, limited by its control groups.

    Args:
        cores: the number of cores to limit; None for the machine's.
    """
    allowed = cores_allowed()
    found = cores if cores is not None else os.cpu_count() or 1
    return found if allowed is None else max(1, min(found, math.floor(allowed)))


def core_share(host_ranks: int, container_ranks: int) -> int:
    """Returns the number of cores that a rank's threads may keep busy: an equal share of the machine's cores and of the
    cores that its control groups allow.

    Args:
        host_ranks: the number of ranks on the machine. The cores to which a launcher has bound this rank don't count,
            because they may be few.
        container_ranks: how many of these ranks are in this process's container and share its limit.
    """
    share, allowed = (os.cpu_count() or 1) // host_ranks, cores_allowed()
    return max(1, share if allowed is None else min(share, math.floor(allowed) // container_ranks))


def cores_allowed(root: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> float | None:
    """Returns the number of cores that control groups allow this process, by quotas of CPU time and sets of cores.
    Returns None if there is no limit, or none can be read.

    Args:
        root: where control groups are mounted.
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
    """Returns the directories of a group and of its parents, whose limits also apply."""
    group = PurePosixPath(path).relative_to("/")
    return [mounted / group, *(mounted / parent for parent in group.parents)]


def _limit(directory: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (directory / "cpu.max").read_text().split()
        return int(quota) / int(period)  # "max" stands for no limit
    return None


def _old_limit(directory: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota = int((directory / "cpu.cfs_quota_us").read_text())
        return quota / int((directory / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    return None


def _cores_of(effective: Path) -> int | None:
    """Returns the number of cores in the file's list, such as 0-3,8; the system lists only cores that the parents also
    allow."""
    with contextlib.suppress(OSError, ValueError):
        bounds = [part.split("-") for part in effective.read_text().strip().split(",")]
        return sum(int(bound[-1]) - int(bound[0]) + 1 for bound in bounds)
    return None
