"""Writes the node daemon's reports: when a signal or a client asks for one.

It takes no lock that a session or a thread of the engine may hold, and asks none of them for anything: what a proxy
does is read in the memory that it shows to observers, mapped a second time, so that the proxy may go meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from proxyccl.proxy.daemon.report import FORMAT, VERSION, Client, DaemonReport, EngineThread, Request, Worker
from proxyccl.proxy.daemon.session import Session
from proxyccl.proxy.hosts import host_name
from proxyccl.proxy.interface import ProxyFailure
from proxyccl.proxy.observe.reader import Observer, ServiceView
from proxyccl.proxy.processes import start_of, stat_of
from proxyccl.proxy.reports import files
from proxyccl.proxy.reports.document import Member, encode
from proxyccl.proxy.reports.rings import TRIGGERS, Ring
from proxyccl.proxy.service import ProxyService
from proxyccl.proxy.thread import ProxyThread

_MEANWHILE = 0.1
"""Seconds between two looks, to see which workers look at their rings."""
_COVERED_SECONDS = 5.0
"""All ranks of a job ask when it fails, and one report shows them all: how long it does for the others."""
_TURN_SECONDS = 10.0

log = logging.getLogger("proxyccl.daemon")


class DaemonReporter:
    """Writes reports of one daemon.

    Args:
        path: the daemon's socket.
        threads: which run its clients' workers.
        longest_sleep: of such a thread, in seconds.
        sessions: gives the sessions there are, without waiting.
        enabled: whether clients and signals may ask for one.
    """

    def __init__(
        self,
        path: Path,
        threads: Sequence[ProxyThread],
        longest_sleep: float,
        sessions: Callable[[], list[Session]],
        *,
        enabled: bool,
    ) -> None:
        self._path = path
        self._threads = threads
        self._longest_sleep = longest_sleep
        self._sessions = sessions
        self.enabled = enabled
        self._group = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._turn = threading.Lock()  # one report at a time
        self._lock = threading.Lock()
        self._asked: dict[str, float] = {}  # by job: time.monotonic() when the last report was begun for it

    def asked(self, job: str, cause: str) -> None:
        """Has a report written, unless one has just been begun for the job. Does not wait for it, but what clients show
        has been read when this returns: who asks may leave.
        """
        now = time.monotonic()
        with self._lock:
            self._asked = {other: then for other, then in self._asked.items() if now - then < _COVERED_SECONDS}
            if not self.enabled or job in self._asked:
                return
            self._asked[job] = now
        looks = _Looks(self._sessions())
        threading.Thread(target=self._write, args=(cause, looks), name="proxyccl-report", daemon=True).start()

    def write(self, cause: str) -> Path | None:
        """Writes a report. None if it can't be written; the log says why."""
        return self._write(cause, _Looks(self._sessions()))

    def _write(self, cause: str, looks: _Looks) -> Path | None:
        time.sleep(_MEANWHILE)
        clients = looks.again()
        if not self._turn.acquire(timeout=_TURN_SECONDS):
            log.error("no report on %s: the last one is still being written", cause)
            return None
        try:
            report = self._report(cause, clients, looks.unread)
            path = files.write(self._group, "daemon", next(self._numbers), encode(report))
        except OSError as error:
            log.error("no report could be written: %s", error)  # noqa: TRY400  no fault of this program
            return None
        finally:
            self._turn.release()
        log.info("%s; report: %s", cause, path)
        return path

    def _report(self, cause: str, clients: list[Client], unread: list[str]) -> DaemonReport:
        threads: list[EngineThread] = []
        for thread in self._threads:
            with _noting(unread, thread.name):
                threads.append(_thread(thread))
        return DaemonReport(
            format=FORMAT,
            version=VERSION,
            process=Member(host_name(), os.getpid(), start_of(os.getpid())),
            socket=str(self._path),
            command=" ".join(sys.orig_argv),
            written=datetime.now(UTC).isoformat(timespec="milliseconds"),
            cause=cause,
            meanwhile=_MEANWHILE,
            longest_sleep=self._longest_sleep,
            threads=threads,
            clients=clients,
            unread=unread,
        )


@contextlib.contextmanager
def _noting(unread: list[str], what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a report says what went wrong and goes on: it is wanted when things are broken
        unread.append(f"{what}: {type(error).__name__}: {error}")


@dataclass
class _Look:
    """What a client's proxy shows at a moment, and a second look to come."""

    service: ProxyService
    threads: Sequence[ProxyThread]
    observer: Observer
    view: ServiceView
    rings: list[Ring]

    @classmethod
    def at(cls, session: Session, opened: contextlib.ExitStack) -> _Look | None:
        """None for a client that has opened no proxy, or one that says nothing of itself."""
        service, threads = session.served, session.threads
        if service is None or service.publication is None:
            return None
        observer = opened.enter_context(Observer(service.publication))
        rings = [Ring.of(ring) for ring in observer.look_into_rings(TRIGGERS)]
        return cls(service, threads, observer, observer.look(), rings)

    def workers(self) -> list[Worker]:
        """The workers, and how often they have looked at their rings since."""
        ended, before, now = self.service.ended, self.view.workers, self.observer.look().workers
        return [
            Worker(thread.name, ended[i], now[i].looks - before[i].looks, now[i])
            for i, thread in enumerate(self.threads)
        ]


class _Looks:
    """Looks at clients, until `again`.

    Attributes:
        unread: what could not be read, and why.
    """

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.unread: list[str] = []
        self._opened = contextlib.ExitStack()
        self._clients: list[tuple[Client, _Look | None]] = []
        for session in sessions:
            look = None
            with _noting(self.unread, session.name):
                look = _Look.at(session, self._opened)
            self._clients.append((_client(session, look), look))

    def again(self) -> list[Client]:
        """The clients as they were, with their workers as they are now."""
        clients = []
        with self._opened:
            for client, look in self._clients:
                workers: list[Worker] = []
                with _noting(self.unread, f"process {client.pid}"):
                    workers = look.workers() if look is not None else []
                clients.append(replace(client, workers=workers))
        return clients


def _client(session: Session, look: _Look | None) -> Client:
    """A client without its workers."""
    now = time.monotonic()
    request, failure = session.request, session.failure
    return Client(
        pid=session.pid,
        description=session.description,
        device_id=session.device_id,
        seconds=round(now - session.since, 3),
        request=Request(request[0], round(now - request[1], 3)) if request is not None else None,
        failure=_failure_text(failure) if failure is not None else None,
        workers=[],
        rings=look.rings if look is not None else [],
        connections=list(look.view.connections) if look is not None else [],
        channels=list(look.view.channels) if look is not None else [],
    )


def _failure_text(failure: ProxyFailure) -> str:
    where = f" on channel {failure.channel}" if failure.channel is not None else ""
    towards = f" to rank {failure.peer}" if failure.peer is not None else ""
    return f"{failure.reason}{where}{towards}"


def _thread(thread: ProxyThread) -> EngineThread:
    number = thread.native_id
    fields = stat_of(Path(f"/proc/self/task/{number}/stat"))
    return EngineThread(thread.name, number, fields[0], int(fields[36]), sorted(os.sched_getaffinity(number)))
