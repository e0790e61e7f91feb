"""If a communicator has failed, waits for the peers' reports for a short time before the program exits.

When one rank's process exits, the whole job may be killed: mpi4py's runner aborts the job, and launchers kill the other
ranks. Without the wait, a hanging rank would be killed before it wrote its report.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from proxyccl.channels.group import Group
from proxyccl.channels.joining.topology import RankInfo
from proxyccl.proxy.processes import is_stopped, start_of
from proxyccl.proxy.reports import files
from proxyccl.proxy.reports.document import Member

_SECONDS = 3.0
"""How long after a failure a program's end waits, in seconds; reports take less than one, or more on a busy machine."""
_ELSEWHERE_SECONDS = 1.0
"""How long a program's end waits for reports of processes of other hosts or PID namespaces, which it can't see."""
_POLL_SECONDS = 0.02


def member_of(info: RankInfo) -> Member:
    process = info.process
    return Member(info.host, process.pid, process.started, process.view)


@dataclass(frozen=True)
class _Awaited:
    communicator: str
    rank: int
    process: Member
    deadline: float

    def is_due(self) -> bool:
        if time.monotonic() > self.deadline:
            return False
        if not self.process.is_visible:
            return True
        pid = self.process.pid
        if start_of(pid) != self.process.started or is_stopped(pid):
            return False
        return not files.is_written(self.communicator, f"rank{self.rank}")


_awaited: list[_Awaited] = []
_lock = threading.Lock()


def expect(group: Group) -> None:
    """Makes `await_reports` wait for the reports of a group's other processes, which were asked to report."""
    now, own = time.monotonic(), group.topology.ranks[group.rank]
    with _lock:
        _awaited[:] = [awaited for awaited in _awaited if awaited.deadline > now]
        for peer, info in enumerate(group.topology.ranks):  # includes ranks that have left but still run
            if info.process.token != own.process.token:
                process = member_of(info)
                seconds = _SECONDS if process.is_visible else _ELSEWHERE_SECONDS
                _awaited.append(_Awaited(group.job, peer, process, now + seconds))


def await_reports() -> None:
    """Waits until each expected report is written or its deadline has passed. The program calls this when it exits."""
    with _lock:
        awaited = list(_awaited)
    for report in awaited:
        while report.is_due():
            time.sleep(_POLL_SECONDS)
