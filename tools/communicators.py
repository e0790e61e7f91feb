"""This machine's communicators, as RAS clients and `proxyccl top --web` show them."""

from __future__ import annotations

import contextlib
import itertools

import proxyccl.channels.communicator  # noqa: F401  # the names of all collectives
from proxyccl.channels.segment.published import Neighbour, RankObserver, RankView, find_ranks
from proxyccl.device.errors import ArgumentError
from proxyccl.proxy.codec import Message
from proxyccl.proxy.processes import is_stopped, start_of


class MissingRank(Message, frozen=True):
    """A rank of this machine that cannot be observed.

    Attributes:
        rank: its number.
        pid: its process.
        dead: whether the process has ended.
        stopped: whether it is stopped by a signal. Otherwise it runs, and has closed the communicator or published
            nothing.
    """

    rank: int
    pid: int
    dead: bool
    stopped: bool


class CommunicatorView(Message, frozen=True):
    """A communicator at one moment: its ranks on this machine.

    Attributes:
        name: its name.
        program: its first rank's program.
        size: the number of its ranks, on all hosts.
        ranks: those that were observed.
        missing: the others of this machine.
    """

    name: str
    program: str
    size: int
    ranks: tuple[RankView, ...]
    missing: tuple[MissingRank, ...]


def communicators() -> list[CommunicatorView]:
    """This user's communicators on this machine, by name.

    Raises:
        ArgumentError: the directory of publications is not this user's own.
    """
    views: list[RankView] = []
    for _, publication in find_ranks():
        with contextlib.suppress(ArgumentError), RankObserver(publication) as observer:  # it was closed meanwhile
            views.append(observer.snapshot())
    jobs = itertools.groupby(views, lambda view: view.publication.description.job)
    return [_communicator(job, tuple(ranks)) for job, ranks in jobs]


def _communicator(job: str, ranks: tuple[RankView, ...]) -> CommunicatorView:
    first = ranks[0].publication
    stopped = {view.rank for view in ranks if is_stopped(view.publication.pid)}
    seen = tuple(view for view in ranks if view.rank not in stopped)
    present = {view.rank for view in seen}
    missing = tuple(_missing(each) for each in first.neighbours if each.rank not in present)
    return CommunicatorView(job, first.description.program, first.description.world_size, seen, missing)


def _missing(neighbour: Neighbour) -> MissingRank:
    dead = start_of(neighbour.pid) != neighbour.started
    return MissingRank(neighbour.rank, neighbour.pid, dead, not dead and is_stopped(neighbour.pid))
