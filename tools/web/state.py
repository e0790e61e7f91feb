"""Makes the state that the page of `proxyccl top --web` shows: ranks, waits, rates of proxies and failures."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from proxyccl.channels.reports.diagnosis import Diagnosis, diagnose
from proxyccl.channels.reports.find import Found
from proxyccl.channels.reports.render import counted
from proxyccl.channels.segment.error_record import SCHEDULE_WAITS
from proxyccl.channels.transfers.published import agents_text
from proxyccl.proxy.codec import Codec, Message
from proxyccl.proxy.observe.rates import ServiceRates, Watch
from proxyccl.proxy.observe.reader import ServiceView
from proxyccl.proxy.reports.document import MOST_BYTES, ReportError
from proxyccl.proxy.reports.files import directory, reports_in
from proxyccl.tools.communicators import CommunicatorView, WaitView, communicators

_REPORTS = 64  # how many of the newest reports are read
_DIAGNOSES = 5  # how many of the newest failures are shown


class State(Message, frozen=True):
    """A snapshot of the machine."""

    time: str  # the time of day
    problem: str = ""  # the reason why the other attributes are empty; "" if there is no problem
    communicators: tuple[CommunicatorView, ...] = ()  # the communicators, sorted by name
    # The proxies' rates since the previous state, without proxies that are new since then.
    services: tuple[ServiceRates, ...] = ()
    agents: tuple[str, ...] = ()  # a line for each agent
    failures: tuple[Diagnosis, ...] = ()  # diagnoses of the newest reports, the newest diagnosis first


STATES = Codec(State, MOST_BYTES)


class States:
    """Makes successive states. `job` None means all jobs, and `process` None means the proxies of all processes."""

    def __init__(self, job: str | None, process: int | None) -> None:
        self._job = job
        self._watch = Watch(job, process)
        self._made: dict[tuple[str, int], int] = {}  # each rank's number of calls in the previous state
        self._reports: list[Path] = []
        self._failures: tuple[Diagnosis, ...] = ()

    def now(self) -> State:
        """Returns the current state. Raises ArgumentError if another user owns the directory of publications."""
        rates = self._watch.rates()
        views = [self._with_waits(view) for view in communicators() if self._job in (None, view.name)]
        self._made = {(view.name, rank.rank): rank.made for view in views for rank in view.present}
        agents = tuple(agents_text().splitlines())
        return State(time.strftime("%H:%M:%S"), "", tuple(views), tuple(rates), agents, self._newest_failures())

    def _with_waits(self, of: CommunicatorView) -> CommunicatorView:
        return replace(of, waits=(*_schedules(of.name, self._watch.views), *self._behind(of)))

    def _behind(self, of: CommunicatorView) -> Iterator[WaitView]:
        """Yields a wait of each rank that has made the most calls for each rank that has made fewer calls. Yields
        nothing if any rank has made a call since the previous state.
        """
        still = all(self._made.get((of.name, view.rank)) == view.made for view in of.present)
        most = max((view.made for view in of.present), default=0)
        if not still:
            return
        for ahead in of.present:
            for behind in of.present:
                if ahead.made == most > behind.made:
                    made = counted(behind.made, "call")
                    text = f"rank {ahead.rank} has called {ahead.last or 'a call'}; rank {behind.rank} has made {made}"
                    yield WaitView(ahead.rank, behind.rank, text)

    def _newest_failures(self) -> tuple[Diagnosis, ...]:
        try:
            names = reports_in(directory())[-_REPORTS:]
        except OSError:  # the directory may not exist
            names = []
        if names != self._reports:
            found = Found()
            for name in names:
                with contextlib.suppress(ReportError):  # `proxyccl doctor` prints this error
                    found.read(name)
            self._reports, self._failures = names, tuple(diagnose(found.ranks, found.daemons)[:_DIAGNOSES])
        return self._failures


def _schedules(job: str, services: Sequence[ServiceView]) -> Iterator[WaitView]:
    for service in services:
        who = service.publication.description
        if who.job == job:
            for wait in service.schedule_waits:
                if wait.peer is not None and wait.peer != who.rank and wait.kind in SCHEDULE_WAITS:
                    what = SCHEDULE_WAITS[wait.kind].format(peer=wait.peer, schedule=wait.schedule)
                    yield WaitView(who.rank, wait.peer, f"the proxy of rank {who.rank} waits for {what}")
