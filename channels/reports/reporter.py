"""When reports are written: when a communicator fails, and when a signal asks for one.

A report is written at most for each failure and each signal, by a thread that the program does not wait for longer than
a moment, and whatever happens to it, the failure that it is about stays what it was.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from proxyccl.channels.reports.collect import DeviceReader, collect
from proxyccl.channels.reports.render import headline
from proxyccl.channels.reports.report import Exchange
from proxyccl.device._native import lib
from proxyccl.proxy.daemon.client import DaemonClient
from proxyccl.proxy.reports import files, on_signal

if TYPE_CHECKING:
    from proxyccl.channels.communicator import Communicator
    from proxyccl.channels.proxy_channel import HandlerChannel, ProxyChannel
    from proxyccl.channels.sm_channel import SmSemaphores

_NOTE_SECONDS = 1.0
"""How long an exception waits for the report that it names."""


class Reporter:
    """Writes the reports of one rank of one communicator, and keeps what only they want to know.

    Attributes:
        thread: number of the thread that made the communicator.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._enabled = files.wanted()
        self.thread = threading.get_ident()
        self._channels: weakref.WeakValueDictionary[int, ProxyChannel | HandlerChannel] = weakref.WeakValueDictionary()
        self._semaphores: weakref.WeakValueDictionary[int, SmSemaphores] = weakref.WeakValueDictionary()
        self._exchange: tuple[str, float] | None = None
        self._device: DeviceReader | None = None
        self._numbers = itertools.count(1)
        self._told_of: set[str] = set()  # other communicators whose failure this one has been reported for
        self._lock = threading.Lock()  # one report at a time, and none once closed
        self._done = threading.Event()
        self._path: Path | None = None

    def open(self) -> None:
        """Begins: from now on failures and signals are reported."""
        if self._enabled:
            self._device = DeviceReader(self._communicator.runtime, self._communicator.control.landing)
            _open[id(self)] = self
            on_signal.install(report_all)

    def close(self) -> None:
        """Ends, behind a report that is being written."""
        _open.pop(id(self), None)
        with self._lock:
            device, self._device = self._device, None
        if device is not None:
            device.close()

    # -- what the rest of the room tells ---

    def add_channel(self, channel: ProxyChannel | HandlerChannel) -> None:
        """A channel that reports shall show as long as somebody uses it."""
        self._channels[channel.id] = channel

    def add_semaphores(self, semaphores: SmSemaphores) -> None:
        """The same for semaphores in device memory."""
        self._semaphores[id(semaphores)] = semaphores

    @contextmanager
    def exchanging(self, purpose: str) -> Iterator[None]:
        """Around a call of the bootstrap. One that fails is what the failure's report shows, and stays."""
        self._exchange = purpose, time.monotonic()
        yield
        self._exchange = None

    # -- what reports ask ---

    @property
    def exchange(self) -> Exchange | None:
        """The call of the bootstrap that is under way."""
        exchange = self._exchange
        return None if exchange is None else Exchange(exchange[0], round(time.monotonic() - exchange[1], 3))

    def beside(self) -> list[str]:
        """The names of the other communicators that this process has open."""
        return sorted({other.job for other in _open_reporters()} - {self.job})

    def channels(self) -> list[ProxyChannel | HandlerChannel]:
        """The channels in use."""
        return [channel for reference in self._channels.valuerefs() if (channel := reference()) is not None]

    def semaphores(self) -> list[SmSemaphores]:
        """The semaphores in use."""
        return [found for reference in self._semaphores.valuerefs() if (found := reference()) is not None]

    # -- writing ---

    def failed(self) -> None:
        """Reports the failure that has ended the communicator, in the calling thread.

        What the process's other communicators wait for is reported too, as it may be the cause.
        """
        own = self._communicator
        try:
            if self._enabled and own.control.record().code != lib.PROXYCCL_ERROR_LOCAL:  # else somebody meant to
                name = own.job
                self._path = self.write("the communicator failed")
                for other in _open_reporters():
                    if other.job != name and name not in other._told_of:
                        other._told_of.add(name)
                        other.write(f"communicator {name} of this process failed")
        finally:
            self._done.set()

    @property
    def job(self) -> str:
        """The communicator's name."""
        return self._communicator.job

    def note(self, error: BaseException) -> None:
        """Adds to the failure's exception where its report is."""
        if self._enabled and self._done.wait(_NOTE_SECONDS) and self._path is not None:
            note = f"report: {self._path} (read it with: proxyccl doctor)"
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)

    def write(self, cause: str) -> Path | None:
        """Writes a report and says so on stderr; the node daemon writes one too, if it runs the proxy.

        None if this is closed, or the file can't be written.
        """
        with self._lock:
            if self._device is None:
                return None
            number = next(self._numbers)
            proxy = self._communicator.proxy_if_started
            if isinstance(proxy, DaemonClient):
                proxy.want_report(f"communicator {self.job}: {cause}")
            self._communicator.runtime.activate(for_proxy=True)
            report = collect(self._communicator, self, self._device, cause, number)
            try:
                path = files.write(report.communicator, f"rank{report.rank}", number, report.encode())
            except OSError as error:
                _say(f"rank {report.rank}: no report could be written: {error}")
                return None
        _say(f"rank {report.rank}: {headline(report)}; report: {path}")
        return path


_open: weakref.WeakValueDictionary[int, Reporter] = weakref.WeakValueDictionary()


def _open_reporters() -> list[Reporter]:
    return [reporter for reference in _open.valuerefs() if (reporter := reference()) is not None]


def report_all(cause: str) -> None:
    """Writes the reports of all communicators of this process, at once: they may wait for one another."""
    threads = [
        threading.Thread(target=reporter.write, args=(cause,), name="proxyccl-report", daemon=True)
        for reporter in _open_reporters()
    ]
    if not threads:
        _say(f"no report on {cause}: no communicator is open")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _say(text: str) -> None:
    sys.stderr.write(f"proxyccl: {text}\n")
    sys.stderr.flush()
