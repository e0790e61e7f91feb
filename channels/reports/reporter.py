"""Writes reports: when a communicator fails, and when a signal asks for one.

For each failure and each signal, a communicator writes at most one report, in a separate thread, for which the program
waits only briefly. If writing a report fails, the program's exception stays the same.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

from proxyccl.channels.group import Group
from proxyccl.channels.liveness.failure import Observer
from proxyccl.channels.reports import peers
from proxyccl.channels.reports.collect import DeviceReader, collect
from proxyccl.channels.reports.render import headline
from proxyccl.channels.reports.report import Exchange
from proxyccl.device._native import lib
from proxyccl.device.errors import ResourceError, UntrustedPathError
from proxyccl.device.process.threads import Thread
from proxyccl.device.shown_text import shown
from proxyccl.proxy.daemon.client import DaemonClient
from proxyccl.proxy.reports import files, on_signal

_UNREPORTED = (lib.PROXYCCL_ERROR_LOCAL, lib.PROXYCCL_ERROR_PARENT)
"""Failures for which no report is written: a program that ends a communicator itself needs none, and a split
communicator appears in its parent's report.
"""
_ASKED_SECONDS = 1.0
_NOTE_SECONDS = 5.0
"""How long an exception waits for its report, to name the file. Reading the device and the stacks takes 20 ms, but may
take seconds on a machine with more busy threads than cores."""


class Reporter(Observer):
    """Writes reports of one rank of one communicator until `close`: at the communicator's failure, and on a signal."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._enabled = files.wanted()
        self._exchange: tuple[str, float] | None = None
        self._device: DeviceReader | None = None
        self._numbers = itertools.count(1)
        self._reported_failures: set[str] = set()  # failed communicators because of which this rank asked for reports
        self._lock = threading.Lock()  # held while a report is written, and by `close`
        self._done = threading.Event()
        self._path: Path | None = None
        if self._enabled:
            self._device = DeviceReader(group.runtime, group.control.readback_buffer)
            _open[id(self)] = self
            on_signal.install(report_all)

    def close(self) -> None:
        """Waits for a report that is being written, and stops reporting."""
        _open.pop(id(self), None)
        with self._lock:
            device, self._device = self._device, None
        if device is not None:
            device.close()

    # -- called by the group ---

    @contextlib.contextmanager
    def exchanging(self, purpose: str) -> Iterator[None]:
        """Records a call of the bootstrap in `exchange` during the call, and keeps a failed call for the report."""
        self._exchange = purpose, time.monotonic()
        yield
        self._exchange = None

    # -- contents of reports ---

    @property
    def exchange(self) -> Exchange | None:
        """The call of the bootstrap that is in progress, or None."""
        exchange = self._exchange
        return None if exchange is None else Exchange(exchange[0], round(time.monotonic() - exchange[1], 3))

    def beside(self) -> list[str]:
        """Returns the names of the other communicators that this process has open."""
        return sorted({other._group.job for other in _open_reporters()} - {self._group.job})

    # -- writing ---

    def failed(self) -> None:
        """Reports the communicator's failure in the calling thread.

        Also reports on the process's other communicators, whose waits may be the cause, and asks their ranks.
        """
        try:
            if self._enabled and self._group.control.record().code not in _UNREPORTED:
                name = self._group.job
                others = [other for other in _open_reporters() if other._group.job != name]
                others = [other for other in others if name not in other._reported_failures]
                peers.expect(self._group)
                _requests.take()  # the reports below also answer peers that ask because of this failure
                for other in others:
                    other._ask_peers(name)
                self._path = self.write("the communicator failed")
                for other in others:
                    other.write(f"communicator {name} of this process failed")
        finally:
            self._done.set()

    def _ask_peers(self, failed: str) -> None:
        """Asks this communicator's other ranks for reports, because this process's communicator `failed` has failed."""
        self._reported_failures.add(failed)
        with self._lock:
            if self._device is not None:
                peers.expect(self._group)
                self._group.request_reports()

    def asked(self) -> None:
        """After a peer has asked, writes reports on this process's communicators in a separate thread."""
        if self._enabled and _requests.take():
            with contextlib.suppress(ResourceError, MemoryError):  # if no thread can be started, no report is written
                Thread(report_all, "proxyccl-report", "another communicator of a peer failed").start()

    def annotate(self, error: BaseException) -> None:
        if self._enabled and self._done.wait(_NOTE_SECONDS) and self._path is not None:
            note = f"report: {self._path} (read it with: proxyccl doctor)"
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)

    def write(self, cause: str) -> Path | None:
        """Writes a report, and prints its path to stderr. Also asks the daemon of the proxy, if any, for a report.

        Returns the report's path; None if the reporter is closed, or the file can't be written.
        """
        with self._lock:
            if self._device is None:
                return None
            number = next(self._numbers)
            proxy = self._group.links.proxy_if_started
            if isinstance(proxy, DaemonClient):
                proxy.request_report(f"communicator {self._group.job}: {cause}")
            self._group.runtime.activate(for_proxy=True)
            report = collect(self._group, self._device, cause, number, self.exchange, self.beside())
            try:
                path = files.write(report.communicator, f"rank{report.rank}", number, report.encode())
            except (OSError, UntrustedPathError) as error:
                _say(f"rank {report.rank}: no report could be written: {error}; set PROXYCCL_REPORT_DIR")
                return None
        _say(f"rank {report.rank}: {headline(report)}; report: {path}")
        return path


class _Requests:
    """Merges requests of peers for reports: a request within _ASKED_SECONDS after another is a repetition."""

    def __init__(self) -> None:
        self._last = -_ASKED_SECONDS
        self._lock = threading.Lock()

    def take(self) -> bool:
        with self._lock:
            now = time.monotonic()
            if now < self._last + _ASKED_SECONDS:
                return False
            self._last = now
            return True


_requests = _Requests()
_open: weakref.WeakValueDictionary[int, Reporter] = weakref.WeakValueDictionary()


def _open_reporters() -> list[Reporter]:
    return [reporter for reference in _open.valuerefs() if (reporter := reference()) is not None]


def report_all(cause: str) -> None:
    """Writes the reports of all communicators of this process, in parallel, because they may wait for one another."""
    threads = [Thread(reporter.write, "proxyccl-report", cause) for reporter in _open_reporters()]
    if not threads:
        _say(f"no report on {cause}: no communicator is open")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _say(text: str) -> None:
    sys.stderr.write(shown(f"proxyccl: {text}") + "\n")
    sys.stderr.flush()
