"""Runs a daemon's process: `proxyccl daemon` until a signal ends it, a job's own daemon until the ranks have ended."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from proxyccl.device.errors import ArgumentError
from proxyccl.device.shown_text import shown
from proxyccl.proxy.daemon.introduced import reach_through
from proxyccl.proxy.daemon.job import JOB_OPTIONS
from proxyccl.proxy.daemon.listeners import HandedOver
from proxyccl.proxy.daemon.protocol import socket_path
from proxyccl.proxy.daemon.server import Attendance, Daemon, DaemonOptions, raise_descriptor_limit
from proxyccl.proxy.reports import on_signal

Server: TypeAlias = AbstractContextManager[str]
"""A context in which a server runs. The context's value says in words how to reach the server."""


class _Lines(logging.Formatter):
    """Formats each record as one line, whatever characters a client's description or error contains."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  the base class defines the name
        return shown(super().formatMessage(record))


def _log_to_stderr(level: int) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=level)


def run(path: Path, options: DaemonOptions, servers: Sequence[Server] = ()) -> int:
    """Serves until SIGTERM or SIGINT, then finishes the clients' requests. Returns the exit code. Writes a report at
    each SIGUSR1. While the daemon runs, `servers` serve web pages and metrics of this user's programs. Raises the
    errors of `Daemon`, and ResourceError if a server's port is in use.
    """
    _log_to_stderr(logging.INFO)
    ending = _Ending()
    raise_descriptor_limit()
    with Daemon(path, options) as daemon, contextlib.ExitStack() as opened:
        for server in servers:
            logging.getLogger("proxyccl.daemon").info("%s", opened.enter_context(server))
        ending.serve(daemon)
    return 0


def run_for_job(listener: int, options: str, starter: int, on_ready: Callable[[], None]) -> None:
    """Serves a job's ranks until they have ended. Handles signals as `run` does. `listener` is the descriptor of the
    listening socket, `options` an encoded `JobOptions`, `starter` the process id of the rank that starts the daemon.
    `on_ready` is called before the daemon serves. Raises ArgumentError if an option is wrong.
    """
    _log_to_stderr(logging.WARNING)
    ending = _Ending()
    raise_descriptor_limit()
    chosen = JOB_OPTIONS.decode(options.encode(), "the rank that starts it")
    every = range(os.cpu_count() or 1)
    # Launchers may bind each rank to few cores, on which the rank's program spins while waiting for a GPU. A proxy
    # thread on such a core would have to wait for time slices.
    suffice = len(chosen.affinity) >= chosen.threads + chosen.programs
    os.sched_setaffinity(0, chosen.affinity if suffice else every)
    with contextlib.suppress(ArgumentError):
        reach_through(socket_path())  # connects to clients' peers that run in other containers
    daemon_options = DaemonOptions(threads=chosen.threads, cores=chosen.cores, programs=chosen.programs)
    with Daemon(HandedOver(listener), daemon_options, Attendance(starter)) as daemon:
        on_ready()
        ending.serve(daemon)


class _Ending:
    """Makes a daemon remove its socket when SIGTERM or SIGINT ends it, even during its start."""

    def __init__(self) -> None:
        self._asked = False
        self._daemon: Daemon | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        self._asked = True
        if self._daemon is not None:
            self._daemon.stop()

    def serve(self, daemon: Daemon) -> None:
        """Makes the daemon serve until a signal ends it. Returns immediately if a signal has already arrived."""
        self._daemon = daemon
        # The system may deliver a signal to a thread other than the main thread, for example if a stopped process gets
        # SIGCONT and then SIGTERM. Such a signal ends the main thread's poll() only through this descriptor.
        signal.set_wakeup_fd(daemon.wake_descriptor, warn_on_full_buffer=False)
        if self._asked:
            daemon.stop()
        if daemon.reporter.enabled:
            on_signal.install(daemon.reporter.write)
        try:
            daemon.serve()
        finally:
            signal.set_wakeup_fd(-1)  # the descriptor closes with the daemon
