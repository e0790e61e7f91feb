"""The state that the page shows, as one message: ranks, waits, rates of proxies, failures."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from proxyccl.channels.reports.diagnosis import Diagnosis, diagnose
from proxyccl.channels.reports.find import Found
from proxyccl.channels.reports.render import counted
from proxyccl.channels.segment.error_record import SCHEDULE_WAITS
from proxyccl.channels.segment.published import RankView
from proxyccl.proxy.codec import Codec, Message
from proxyccl.proxy.observe.rates import ServiceRates
from proxyccl.proxy.observe.reader import ServiceView
from proxyccl.proxy.reports.document import MOST_BYTES, ReportError
from proxyccl.proxy.reports.files import directory, reports_in
from proxyccl.tools.communicators import CommunicatorView, communicators
from proxyccl.tools.top import Watch, agents_text

_REPORTS = 64  # the newest, which are read
_DIAGNOSES = 5  # the newest, which are shown


class RankLine(Message, frozen=True):
    """A rank of this machine.

    Attributes:
        rank: its number.
        pid: its process.
        device: the ordinal of its device; None if the rank is not observed.
        calls: collective calls that it has made.
        last: the last of them, in words.
        state: "runs", "failed", "leaves", "stopped", "ended" or "absent".
        failure: in words; "" if there is none.
    """

    rank: int
    pid: int
    device: int | None
    calls: int
    last: str
    state: str
    failure: str


class WaitLine(Message, frozen=True):
    """A rank that waits for another, and how it shows."""

    rank: int
    peer: int
    text: str


class CommunicatorLines(Message, frozen=True):
    """A communicator: its ranks on this machine, and who waits for whom."""

    name: str
    program: str
    size: int
    ranks: tuple[RankLine, ...]
    waits: tuple[WaitLine, ...]


class State(Message, frozen=True):
    """The state of a machine at one moment.

    Attributes:
        time: of day.
        problem: why there is nothing else; "" if there is.
        communicators: by name.
        services: the proxies' rates since the last state, without those that are new.
        agents: a line for each agent.
        failures: the newest diagnoses of reports, the newest first.
    """

    time: str
    problem: str = ""
    communicators: tuple[CommunicatorLines, ...] = ()
    services: tuple[ServiceRates, ...] = ()
    agents: tuple[str, ...] = ()
    failures: tuple[Diagnosis, ...] = ()


STATES = Codec(State, MOST_BYTES)


class States:
    """Makes states, one after the other.

    Args:
        job: of this job only; None for all.
        process: proxies in this process only; None for all.
    """

    def __init__(self, job: str | None, process: int | None) -> None:
        self._job = job
        self._watch = Watch(job, process)
        self._made: dict[tuple[str, int], int] = {}  # calls at the last state
        self._reports: list[Path] = []
        self._failures: tuple[Diagnosis, ...] = ()

    def now(self) -> State:
        """The state now.

        Raises:
            ArgumentError: the directory of publications is not this user's own.
        """
        rates = self._watch.rates()
        views = [view for view in communicators() if self._job in (None, view.name)]
        lines = tuple(self._lines(view, self._watch.views) for view in views)
        self._made = {(view.name, rank.rank): rank.made for view in views for rank in view.ranks}
        agents = tuple(agents_text().splitlines())
        return State(time.strftime("%H:%M:%S"), "", lines, tuple(rates), agents, self._newest_failures())

    def close(self) -> None:
        """Stops observing."""
        self._watch.close()

    def _lines(self, of: CommunicatorView, services: Sequence[ServiceView]) -> CommunicatorLines:
        ranks = [_line(view) for view in of.ranks]
        for missing in of.missing:
            state = "ended" if missing.dead else "stopped" if missing.stopped else "absent"
            ranks.append(RankLine(missing.rank, missing.pid, None, 0, "", state, ""))
        waits = [*_schedules(of.name, services), *self._behind(of)]
        return CommunicatorLines(
            of.name, of.program, of.size, tuple(sorted(ranks, key=lambda line: line.rank)), tuple(waits)
        )

    def _behind(self, of: CommunicatorView) -> Iterator[WaitLine]:
        """Ranks that have made more calls than others, where no rank has made one since the last state."""
        still = all(self._made.get((of.name, view.rank)) == view.made for view in of.ranks)
        most = max((view.made for view in of.ranks), default=0)
        if not still:
            return
        for ahead in of.ranks:
            for behind in of.ranks:
                if ahead.made == most > behind.made:
                    called = "a call" if ahead.last is None else _call(ahead)
                    made = counted(behind.made, "call")
                    text = f"rank {ahead.rank} has called {called}; rank {behind.rank} has made {made}"
                    yield WaitLine(ahead.rank, behind.rank, text)

    def _newest_failures(self) -> tuple[Diagnosis, ...]:
        try:
            names = reports_in(directory())[-_REPORTS:]
        except OSError:  # nothing was ever reported
            names = []
        if names != self._reports:
            found = Found()
            for name in names:
                with contextlib.suppress(ReportError):  # `proxyccl doctor` tells
                    found.read(name)
            self._reports, self._failures = names, tuple(diagnose(found.ranks, found.daemons)[:_DIAGNOSES])
        return self._failures


def _line(view: RankView) -> RankLine:
    state = "failed" if view.failure else "leaves" if view.leaving else "runs"
    last = "" if view.last is None else _call(view)
    seen = view.publication
    return RankLine(view.rank, seen.pid, seen.device, view.made, last, state, view.failure)


def _call(view: RankView) -> str:
    assert view.last is not None
    return f"{view.last.fields['collective']} #{view.last.number}"


def _schedules(job: str, services: Sequence[ServiceView]) -> Iterator[WaitLine]:
    for service in services:
        who = service.publication.description
        if who.job == job:
            for wait in service.schedule_waits:
                if wait.peer is not None and wait.peer != who.rank and wait.kind in SCHEDULE_WAITS:
                    what = SCHEDULE_WAITS[wait.kind].format(peer=wait.peer, schedule=wait.schedule)
                    yield WaitLine(who.rank, wait.peer, f"the proxy of rank {who.rank} waits for {what}")
