"""Writes a report of the node daemon when a signal or a client requests one.

The reporter takes no lock that a session or an engine thread may hold, so it never waits for a thread that hangs. The
reporter maps the memory in which a proxy publishes its state, so the proxy may be closed during the report.
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
from datetime import UTC, datetime
from pathlib import Path

from msgspec import structs

from proxyccl.device.errors import UntrustedPathError
from proxyccl.device.process.threads import Thread
from proxyccl.proxy.daemon.report import Client, DaemonReport, EngineThread, Request, Worker
from proxyccl.proxy.daemon.session import Session
from proxyccl.proxy.interface import ProxyFailure
from proxyccl.proxy.observe.reader import Observer
from proxyccl.proxy.processes import process_name, stat_of
from proxyccl.proxy.reports import files
from proxyccl.proxy.reports.document import Member
from proxyccl.proxy.thread import ProxyThread

_MEANWHILE = 0.1
"""Seconds between two snapshots, whose difference shows whether workers poll their rings."""
_COVERED_SECONDS = 5.0
"""When a job fails, all its ranks ask for a report. One report shows all ranks, so a job's further requests within this
number of seconds are ignored.
"""
_TURN_SECONDS = 10.0

log = logging.getLogger("proxyccl.daemon")


class DaemonReporter:
    """Writes reports about the daemon at the socket `place`. `threads` run the clients' workers; `sessions` returns the
    current sessions without waiting. If `enabled`, clients and signals may request reports.
    """

    def __init__(
        self, place: str, threads: Sequence[ProxyThread], sessions: Callable[[], list[Session]], *, enabled: bool
    ) -> None:
        self._place = place
        self._threads = threads
        self._sessions = sessions
        self.enabled = enabled
        self._group = secrets.token_hex(4)
        self._numbers = itertools.count(1)
        self._turn = threading.Lock()  # a thread holds this lock while it writes a report
        self._lock = threading.Lock()
        self._requested: dict[str, float] = {}  # maps a job to the time of its last report (time.monotonic())

    def request(self, job: str, cause: str) -> None:
        """Writes a report in a separate thread, unless a report for the job was started within the last few seconds.
        The clients' state is read before this function returns, so the requesting client may disconnect immediately.
        """
        now = time.monotonic()
        with self._lock:
            self._requested = {other: then for other, then in self._requested.items() if now - then < _COVERED_SECONDS}
            if not self.enabled or job in self._requested:
                return
            self._requested[job] = now
        snapshots = _Snapshots(self._sessions())
        Thread(self._write, "proxyccl-report", cause, snapshots).start()

    def write(self, cause: str) -> Path | None:
        """Writes a report. Returns the file's path. If the file can't be written, logs the reason and returns None."""
        return self._write(cause, _Snapshots(self._sessions()))

    def _write(self, cause: str, snapshots: _Snapshots) -> Path | None:
        time.sleep(_MEANWHILE)
        clients = snapshots.finish()
        if not self._turn.acquire(timeout=_TURN_SECONDS):
            log.error("no report on %r: an earlier one is still being written", cause)
            return None
        try:
            report = self._report(cause, clients, snapshots.unread)
            path = files.write(self._group, "daemon", next(self._numbers), report.encode())
        except (OSError, UntrustedPathError) as error:
            log.error("cannot write a report: %s; set PROXYCCL_REPORT_DIR", error)  # noqa: TRY400  needs no traceback
            return None
        finally:
            self._turn.release()
        log.info("%s; report: %s", cause, path)
        return path

    def _report(self, cause: str, clients: list[Client], unread: list[str]) -> DaemonReport:
        threads: list[EngineThread] = []
        for thread in self._threads:
            with _collecting_errors(unread, thread.name):
                threads.append(_thread(thread))
        return DaemonReport(
            version=4,
            process=Member.own(),
            socket=self._place,
            command=" ".join(sys.orig_argv),
            written=datetime.now(UTC).isoformat(timespec="milliseconds"),
            cause=cause,
            meanwhile=_MEANWHILE,
            longest_sleep=max(thread.idle.max_sleep_us for thread in self._threads) / 1e6,
            threads=threads,
            clients=clients,
            unread=unread,
        )


@contextlib.contextmanager
def _collecting_errors(unread: list[str], what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the report lists the parts that cannot be read
        unread.append(f"{what}: {type(error).__name__}: {error}")


class _Snapshots:
    """The clients' state at one moment. `finish` adds the workers' state at a later moment."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.unread: list[str] = []  # the parts of the state that could not be read, each with the reason
        self._opened = contextlib.ExitStack()
        self._clients: list[tuple[Client, Callable[[], list[Worker]]]] = []
        for session in sessions:
            client: Client = _client(session)
            workers: Callable[[], list[Worker]] = list
            with _collecting_errors(self.unread, session.name):
                client, workers = self._with_proxy(client, session)
            self._clients.append((client, workers))

    def _with_proxy(self, client: Client, session: Session) -> tuple[Client, Callable[[], list[Worker]]]:
        service, threads = session.served, session.threads
        if service is None or service.publication is None:
            return client, list
        observer = self._opened.enter_context(Observer(service.publication))
        rings, view = observer.look_into_rings(), observer.snapshot()

        def workers() -> list[Worker]:
            ended, before, now = service.ended, view.workers, observer.snapshot().workers
            return [
                Worker(thread.name, ended[i], now[i].looks - before[i].looks, now[i])
                for i, thread in enumerate(threads)
            ]

        connections, channels = list(view.connections), list(view.channels)
        return structs.replace(client, rings=rings, connections=connections, channels=channels), workers

    def finish(self) -> list[Client]:
        clients = []
        with self._opened:
            for client, workers_of in self._clients:
                workers: list[Worker] = []
                with _collecting_errors(self.unread, process_name(client.pid)):
                    workers = workers_of()
                clients.append(structs.replace(client, workers=workers))
        return clients


def _client(session: Session) -> Client:
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
        rings=[],
        connections=[],
        channels=[],
    )


def _failure_text(failure: ProxyFailure) -> str:
    where = f" on channel {failure.channel}" if failure.channel is not None else ""
    to_peer = f" to rank {failure.peer}" if failure.peer is not None else ""
    return f"{failure.reason}{where}{to_peer}"


def _thread(thread: ProxyThread) -> EngineThread:
    number = thread.native_id
    fields = stat_of(Path(f"/proc/self/task/{number}/stat"))
    return EngineThread(thread.name, number, fields[0], int(fields[36]), sorted(os.sched_getaffinity(number)))
