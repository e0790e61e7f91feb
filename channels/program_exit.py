"""Closes groups that are open when the program exits, and drops groups in forked children."""

from __future__ import annotations

import atexit
import os
import time

from proxyccl.channels.group import Group, open_groups, open_lock, releasing
from proxyccl.channels.liveness import program_end
from proxyccl.channels.reports.peers import await_reports

_POLL_SECONDS = 0.0005


def _close_groups(failure: str) -> None:
    """Closes the groups that the program left open. Ranks may have made these groups in different orders.

    If `failure` is "", the program exits normally, so this function waits for the peers, which may still need this
    rank's memory. Otherwise an exception or a nonzero status ends the program, and the peers' calls raise an error with
    the reason `failure`.
    """
    with open_lock:
        groups = [group for group in open_groups if group.parent is None]  # split groups leave with their parents
        everyone = list(open_groups)
    left = []
    ended = time.monotonic()
    for group in everyone:
        group.vain_waits.bound_transfers(ended)
    for group in groups:
        if group.leave(failure):
            left.append(group)
        else:
            group.release(healthy=False)
    began = time.monotonic()
    deadline = began + max((group.timeout for group in groups if group.linger is None), default=0)
    for group in left:  # all ranks have announced that they leave, so the order of the groups does not matter
        _await_peers(group, deadline if group.linger is None else ended + group.linger)
    for thread, linger in releasing:
        thread.join(max(0, max(deadline, ended + linger) - time.monotonic()))


def _await_peers(group: Group, deadline: float) -> None:
    """Waits for the peers to close the group, then releases the group. If a peer does not close the group in time,
    writes a report that names the peer, because no caller is left to catch an error.
    """
    while (present := group.peers_present()) and not group.failure.aborted:
        if time.monotonic() > deadline:
            if group.linger is not None:
                break
            group.late(min(present), "close", "close the communicator", group.timeout)
        time.sleep(_POLL_SECONDS)
    group.release(healthy=not present)


def watch() -> None:
    """Begins to watch how the program ends."""
    program_end.watch()


@atexit.register
def _end() -> None:
    _close_groups(program_end.failure())
    await_reports()


def _leave_to_parent() -> None:
    """Drops all groups in a forked child without any other effect, because the parent process keeps using them."""
    for group in open_groups:
        group.failure.close()
        group.launches.recheck_next_call()
    open_groups.clear()
    releasing.clear()


os.register_at_fork(after_in_child=_leave_to_parent)
