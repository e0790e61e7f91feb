"""The idle policy of a proxy for which none was asked: by the cores that it shares with the programs it serves."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path, PurePosixPath

from proxyccl.proxy.thread import IdlePolicy

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def choose_idle(cores: int, programs: int, threads: int, within: tuple[int, int] | None = None) -> IdlePolicy:
    """The policy of threads that have to share cores with programs.

    A program may spin while it waits for its GPU, and a thread while it has work, so each of them needs a core.

    Args:
        cores: that all of them may run on.
        programs: ranks of this machine that use the threads.
        threads: of all their proxies.
        within: of these, the programs and threads of this process's container, which share its quota; None for all.
    """
    allowed = cores_allowed()
    suffice = cores >= programs + threads and (allowed is None or allowed >= sum(within or (programs, threads)))
    return IdlePolicy.where_cores_suffice() if suffice else IdlePolicy()


def usable_cores(cores: int | None = None) -> int:
    """The number of threads that cores are there for: no more than control groups allow this process.

    Args:
        cores: those that there are; None for all of the machine's.
    """
    allowed = cores_allowed()
    found = cores if cores is not None else os.cpu_count() or 1
    return found if allowed is None else max(1, min(found, math.floor(allowed)))


def core_share(host_ranks: int, container_ranks: int) -> int:
    """The cores that a rank's threads may keep busy: an equal share of the machine's, and of its control groups' limit.

    Args:
        host_ranks: the ranks on the machine. A launcher may have bound this one to few cores, so these don't count.
        container_ranks: of these, the ranks in this process's container, which share its limit.
    """
    share, allowed = (os.cpu_count() or 1) // host_ranks, cores_allowed()
    return max(1, share if allowed is None else min(share, math.floor(allowed) // container_ranks))


def cores_allowed(root: Path = _CGROUPS, own: Path = _OWN_CGROUPS) -> float | None:
    """The CPU time that control groups allow this process, in cores; None for no limit, or none that can be read.

    Args:
        root: where control groups are mounted.
        own: the file that names those of the process.
    """
    limits = []
    with contextlib.suppress(OSError, ValueError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                limits += [_limit(directory) for directory in _upwards(root, path)]
            elif "cpu" in controllers.split(","):
                limits += [_old_limit(directory) for directory in _upwards(root / controllers, path)]
    return min((limit for limit in limits if limit is not None), default=None)


def _upwards(mounted: Path, path: str) -> list[Path]:
    """A group's directory and those of its parents, whose limits hold for it too."""
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
