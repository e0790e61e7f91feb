"""Node daemons for tests, as separate processes: forks, or fresh interpreters if the tests use GPUs (processes.py)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from proxyccl.channels.joining import proxy_place
from proxyccl.proxy.daemon.server import Daemon, DaemonOptions
from proxyccl.proxy.processes import stat_of
from support.forked import ForkedProcess
from support.paths import PROGRAMS
from support.processes import started

if TYPE_CHECKING:  # programs of ranks import this module
    import pytest

_START_SECONDS = 180.0
_END_SECONDS = 60.0
_FOR_SHARED_CORES = ("--max-sleep-us", "1000")
"""Makes the daemon sleep as it does when cores are scarce, because it does not see the other tests that use them."""


@dataclass
class RunningDaemon:
    """A `proxyccl daemon`."""

    path: Path
    process: subprocess.Popen[str] | ForkedProcess
    ended: int | None = None

    @property
    def log(self) -> str:
        """The daemon's output so far."""
        return self.path.with_name(self.path.name + ".log").read_text()

    def descriptors(self) -> int:
        """Returns the number of file descriptors that the daemon holds."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def mappings(self) -> int:
        """Returns the number of shared memories that the daemon maps."""
        return Path(f"/proc/{self.process.pid}/maps").read_text().count("memfd:proxyccl")

    def threads(self) -> int:
        """Returns the number of the daemon's threads."""
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def resources(self) -> tuple[int, int, int]:
        """Returns the numbers of the daemon's descriptors, mappings and threads."""
        return self.descriptors(), self.mappings(), self.threads()

    def settles(self, resources: tuple[int, int, int]) -> bool:
        """Waits until the daemon holds at most `resources`, because the daemon frees a client's resources some
        time after the client's end. Returns False after a time-out.
        """
        deadline = time.monotonic() + _END_SECONDS
        while time.monotonic() < deadline:
            if all(now <= then for now, then in zip(self.resources(), resources, strict=True)):
                return True
            time.sleep(0.02)
        return False

    def connect(self) -> socket.socket:
        """Returns a new, unused connection to the daemon's socket."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(_END_SECONDS)
        connection.connect(str(self.path))
        return connection

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stops all of the daemon's threads during the `with` block."""
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            deadline = time.monotonic() + _END_SECONDS
            while any(state != "T" for state in self._thread_states()):
                assert time.monotonic() < deadline, "the daemon does not stop"
                time.sleep(0.002)
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    def _thread_states(self) -> list[str]:
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        return [stat_of(path)[0] for path in tasks]

    def end(self, number: int = signal.SIGTERM) -> None:
        """Sends the daemon a signal, and waits until its process has ended."""
        if self.ended is None:
            self.process.send_signal(number)
            self.wait()

    def wait(self) -> None:
        self.ended = self.process.wait(timeout=_END_SECONDS)


@contextlib.contextmanager
def running_daemon(path: Path, *arguments: str) -> Iterator[RunningDaemon]:
    """Runs a daemon, which listens at a path, during the `with` block."""
    command = [str(PROGRAMS / "command.py"), "daemon", "--socket", str(path), *_FOR_SHARED_CORES, *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PROXYCCL_PROXY"}
    log = path.with_name(path.name + ".log")
    with log.open("w") as errors:
        process = started(command, environment, errors, errors)
        daemon = RunningDaemon(path, process)
        try:
            deadline = time.monotonic() + _START_SECONDS
            while "serving user" not in daemon.log:  # connections succeed even before the set-up is complete
                assert process.poll() is None, daemon.log
                assert time.monotonic() < deadline, "the daemon does not serve"
                time.sleep(0.02)
            yield daemon
            daemon.end()
        finally:
            process.kill()
            process.wait(_END_SECONDS)


@contextlib.contextmanager
def daemon_inside(path: Path) -> Iterator[Daemon]:
    """Runs a daemon in a thread of this process during the `with` block."""
    with Daemon(path, DaemonOptions(threads=1)) as running:
        serving = threading.Thread(target=running.serve)
        serving.start()
        try:
            yield running
        finally:
            running.stop()
            serving.join()


def forget_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process forget its job's daemon during a test, so that the test starts a new one."""
    monkeypatch.setattr(proxy_place, "_known_name", "")
