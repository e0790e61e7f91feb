"""The daemon itself: the socket, the threads that run its clients' workers, and a session for each client."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import resource
import select
import socket
import stat
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from proxyccl.device import open_driver
from proxyccl.device.errors import ArgumentError, ResourceError
from proxyccl.device.gpu import GpuRuntime
from proxyccl.device.host import HostRuntime
from proxyccl.device.runtime import Runtime
from proxyccl.proxy.daemon.reporter import DaemonReporter
from proxyccl.proxy.daemon.session import Session
from proxyccl.proxy.reports import files
from proxyccl.proxy.service import MAX_RINGS
from proxyccl.proxy.thread import IdlePolicy, ProxyThread

BACKLOG = 512
_FULL_MS = 100  # how long no client is let in when descriptors have run out
_DRAIN_SECONDS = 10.0

log = logging.getLogger("proxyccl.daemon")


@dataclass(frozen=True)
class DaemonOptions:
    """How a daemon runs its clients' proxies.

    Attributes:
        threads: that run the workers of all clients.
        cores: that these may run on; None for any. Those near the GPUs, or the RDMA devices, answer soonest.
        idle: what a thread does when there is nothing to do.
    """

    threads: int = 1
    cores: Collection[int] | None = None
    idle: IdlePolicy = field(default_factory=IdlePolicy)


class Daemon:
    """Listens from when it is made. `serve` lets clients in; `close` ends all.

    Args:
        path: of the socket.
        options: its threads.

    Attributes:
        reporter: writes its reports.

    Raises:
        ArgumentError: an option is wrong, or something that is no socket lies at the path.
        ResourceError: another daemon listens there.
    """

    def __init__(self, path: Path, options: DaemonOptions | None = None) -> None:
        chosen = options or DaemonOptions()
        if not isinstance(chosen.threads, int) or not 1 <= chosen.threads <= MAX_RINGS:
            raise ArgumentError("threads", f"must be an integer from 1 to {MAX_RINGS}, not {chosen.threads!r}")
        reports = files.wanted()
        self.path = path
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._lock = threading.Lock()
        self._sessions: dict[Session, threading.Thread] = {}
        self._runtimes: dict[str, Runtime] = {}
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._wake_read)
            undo.callback(os.close, self._wake_write)
            _make_private(path.parent)
            self._guard = _guard(path)
            undo.callback(os.close, self._guard)
            self._listener = _listen(path)
            undo.callback(self._listener.close)
            self._threads = [
                ProxyThread(f"proxyccl-proxy-{i}", chosen.idle, chosen.cores) for i in range(chosen.threads)
            ]
            undo.pop_all()
        sleep = chosen.idle.max_sleep_us / 1e6
        # A copy in one step: a report must not wait for the lock, under which a driver may hang.
        self.reporter = DaemonReporter(path, self._threads, sleep, lambda: list(self._sessions), enabled=reports)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def clients(self) -> int:
        """How many there are."""
        with self._lock:
            return len(self._sessions)

    def stop(self) -> None:
        """Has `serve` return. From any thread, and from a signal's handler."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    def serve(self) -> None:
        """Lets clients in until `stop`."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        log.info("serving user %d at %s with %d threads", os.geteuid(), self.path, len(self._threads))
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._wake_read in ready:
                return
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                log.warning("a client can't be let in: %s", error)
                stopped = select.poll()
                stopped.register(self._wake_read, select.POLLIN)
                stopped.poll(_FULL_MS)
                continue
            self._admit(connection)

    def _admit(self, connection: socket.socket) -> None:
        session = Session(connection, self._open_runtime, self._deal_threads, self.reporter.asked)
        thread = threading.Thread(target=self._run, args=(session,), name="proxyccl-client", daemon=True)
        with self._lock:
            self._sessions[session] = thread
        thread.start()

    def _run(self, session: Session) -> None:
        try:
            session.run()
        finally:
            with self._lock:
                del self._sessions[session]

    def _open_runtime(self, name: str, device_id: str) -> Runtime:
        """One for each device, which all its clients share."""
        key = name if name == "host" else device_id  # the host's devices are all this machine's memory
        with self._lock:
            if key not in self._runtimes:
                self._runtimes[key] = _open_runtime(name, device_id)
            return self._runtimes[key]

    def _deal_threads(self, workers: int) -> Sequence[ProxyThread]:
        """Those with the fewest workers; one is dealt twice only where there are more workers than threads."""
        with self._lock:
            users = [thread for session in self._sessions for thread in session.threads]
            by_load = sorted(self._threads, key=users.count)
            return [by_load[i % len(by_load)] for i in range(workers)]

    def close(self) -> None:
        """Drains what clients have asked for, tells them, ends their sessions, and takes the socket away."""
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        with self._lock:
            sessions = dict(self._sessions)
        log.info("ending, with %d clients", len(sessions))
        for session in sessions:
            session.end(_DRAIN_SECONDS)
        for thread in sessions.values():
            thread.join(2 * _DRAIN_SECONDS)
        for proxy_thread in self._threads:
            if not proxy_thread.close(_DRAIN_SECONDS):
                log.error("a thread does not end: the driver does not return to it")
        for descriptor in (self._guard, self._wake_read, self._wake_write):
            os.close(descriptor)
        log.info("ended")


def _open_runtime(name: str, device_id: str) -> Runtime:
    if name == "host":
        return HostRuntime()
    if name not in ("cuda", "hip"):
        raise ArgumentError("runtime", f"{name!r:.100} is none of host, cuda, hip")
    driver = open_driver(name)
    for device in range(driver.device_count()):
        if driver.device(device).device_id == device_id:
            return GpuRuntime(driver, device)
    raise ArgumentError(
        "device", f"the node daemon does not see {device_id!r:.100}; it must be started with all of the node's devices"
    )


def _make_private(directory: Path) -> None:
    """Makes the socket's directory where there is none, and refuses one where others could put a socket."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        info = directory.stat()
    except OSError as error:
        raise ArgumentError("socket", f"no directory for it: {error}") from None
    shared = info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if info.st_uid not in (0, os.geteuid()) or (shared and not info.st_mode & stat.S_ISVTX):
        raise ArgumentError("socket", f"others than this user can write to {directory}")


def _guard(path: Path) -> int:
    """A lock beside the socket, which goes with the process: a socket without it was left by one that was killed."""
    name = path.with_name(path.name + ".lock")
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ArgumentError("socket", f"no lock beside it: {error}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ResourceError(f"another node daemon listens at {path}; stop it, or name another --socket") from None
    return descriptor


def _listen(path: Path) -> socket.socket:
    if path.exists() or path.is_symlink():
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ArgumentError("socket", f"{path} is no socket, and is left alone")
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    before = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ArgumentError("socket", f"can't listen at {path}: {error}") from None
    finally:
        os.umask(before)
    return listener


def raise_descriptor_limit() -> None:
    """Lets this process have as many descriptors as it may: each client's memory takes some."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
