"""The daemon: its listening socket, the threads that run the clients' workers, and a session for each client."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import resource
import select
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from proxyccl.device.arguments.integers import as_integer
from proxyccl.device.errors import ArgumentError, ResourceError
from proxyccl.device.gpu.runtime import GpuRuntime
from proxyccl.device.host import HostRuntime
from proxyccl.device.memory.sockets import peer_credentials
from proxyccl.device.process.threads import Thread
from proxyccl.device.runtime import Runtime
from proxyccl.device.runtimes import open_driver
from proxyccl.proxy.daemon.introductions import Introductions
from proxyccl.proxy.daemon.listeners import Listener, SocketFile
from proxyccl.proxy.daemon.reporter import DaemonReporter
from proxyccl.proxy.daemon.session import Session, refuse_user
from proxyccl.proxy.reports import files
from proxyccl.proxy.thread import IdlePolicy, ProxyThread, choose_idle
from proxyccl.proxy.workers import MAX_RINGS

_FULL_MS = 100  # after descriptors have run out, milliseconds until the next accept()
_DRAIN_SECONDS = 10.0
MOST_GREETED = 128
"""The most connections that have not sent a hello; each of them has a thread and a descriptor."""
_SILENT_SECONDS = 1.0  # a client has at least this many seconds to send its hello

START_SECONDS = 30.0
"""Seconds that a job's own daemon waits for its first client, while the rank that started it lives."""
LINGER_SECONDS = 1.0
"""Seconds that a job's own daemon waits for the next client, while a process of an earlier client lives."""

log = logging.getLogger("proxyccl.daemon")


@dataclass(frozen=True)
class DaemonOptions:
    """A daemon's options for its clients' proxies."""

    threads: int = 1  # number of threads that run the workers of all clients
    # Cores that the threads may run on; None for any core. Cores near the GPUs or network devices have the lowest
    # latency.
    cores: Collection[int] | None = None
    # The idle policy for clients that request no policy; with None, the number of cores determines the policy.
    idle: IdlePolicy | None = None
    programs: int = 1  # the expected number of clients' processes


class Attendance:
    """Decides when a job's own daemon ends. An `Attendance` records the live processes that have been clients, and the
    time at which the last client disconnected. `starter` is the id of the process that starts the daemon.
    """

    def __init__(self, starter: int) -> None:
        self._pids: dict[int, int] = {}  # maps a pidfd to the process id
        self._anybody_came = False
        self._expects_more = True
        self._empty_since: float | None = time.monotonic()
        self._add(starter)

    @property
    def descriptors(self) -> list[int]:
        """The pidfds of the clients' processes; a pidfd becomes readable when its process ends."""
        return list(self._pids)

    def came(self, pid: int) -> int | None:
        """Records a process. Returns a new pidfd; None if it has a pidfd, has ended, or is in another PID namespace."""
        self._anybody_came = True
        return self._add(pid)

    def left(self, *, suspended: bool) -> None:
        """Records the end of a session. A client that `suspended` needs the daemon's memory for other programs."""
        self._expects_more = not suspended

    def _add(self, pid: int) -> int | None:
        if pid in self._pids.values():
            return None
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:  # the process has ended, or is in another PID namespace
            return None
        self._pids[descriptor] = pid
        return descriptor

    def ended(self, descriptor: int) -> int:
        """Forgets the ended process with this pidfd, and returns the process's id."""
        os.close(descriptor)
        return self._pids.pop(descriptor)

    def milliseconds_left(self, clients: int) -> int | None:
        """Returns the milliseconds after which the daemon ends unless another client connects; None if `clients`, the
        number of connected clients, is not 0.
        """
        if clients:
            self._empty_since = None
            return None
        now = time.monotonic()
        if self._empty_since is None:
            self._empty_since = now
        patience = LINGER_SECONDS if self._anybody_came else START_SECONDS
        if not (self._pids and self._expects_more):
            patience = 0.0
        return max(0, math.ceil(1000 * (self._empty_since + patience - now)))

    def close(self) -> None:
        for descriptor in self.descriptors:
            self.ended(descriptor)


class Daemon(contextlib.AbstractContextManager["Daemon"]):
    """A daemon. The constructor starts to listen, `serve` accepts clients, and `close` ends the clients' sessions.
    Raises ArgumentError if an option is wrong, or the path names a file that is not a socket, and ResourceError if
    another daemon listens at the path.

    Args:
        place: path of the socket to create, or a listening socket.
        options: see `DaemonOptions`.
        attendance: decides when a job's own daemon ends; None for a daemon that serves until `stop`.
    """

    def __init__(
        self, place: Path | Listener, options: DaemonOptions | None = None, attendance: Attendance | None = None
    ) -> None:
        chosen = options or DaemonOptions()
        as_integer(chosen.threads, "threads", f"must be an integer from 1 to {MAX_RINGS}", 1, MAX_RINGS)
        self._options = chosen
        reports = files.wanted()
        self._attendance = attendance
        self._stopping = False
        # A byte that is written to `wake_descriptor` wakes `serve`.
        self._wake_read, self.wake_descriptor = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._lock = threading.Lock()
        self._sessions: dict[Session, threading.Thread] = {}
        self._runtimes: dict[str, Runtime] = {}
        self._opening: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)  # by device
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._wake_read)
            undo.callback(os.close, self.wake_descriptor)
            self._listener = SocketFile(place) if isinstance(place, Path) else place
            undo.callback(self._listener.release)
            undo.callback(self._listener.close)
            self.path = Path(self._listener.name)  # as reports name the socket
            self._introductions = Introductions(self._listener.name)
            undo.callback(self._introductions.close)
            self._threads = [
                ProxyThread(f"proxyccl-proxy-{i}", chosen.idle or IdlePolicy(), chosen.cores)
                for i in range(chosen.threads)
            ]
            undo.pop_all()
        # A report must not wait for the lock, whose holder may hang in the driver; list() copies the sessions
        # atomically.
        self.reporter = DaemonReporter(
            self._listener.name, self._threads, lambda: list(self._sessions), enabled=reports
        )

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def clients(self) -> int:
        with self._lock:
            return len(self._sessions)

    def stop(self) -> None:
        """Makes `serve` return. Any thread and any signal handler may call this method."""
        self._stopping = True
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full, so `serve` will wake anyway
            os.write(self.wake_descriptor, b"x")

    def serve(self) -> None:
        """Accepts clients until `stop`, or, in a job's own daemon, until all clients have ended."""
        listener = self._listener.socket
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        poll.register(listener, select.POLLIN)
        for descriptor in self._attendance.descriptors if self._attendance is not None else ():
            poll.register(descriptor, select.POLLIN)
        log.info("serving user %d at %s with %d threads", os.geteuid(), self._listener.name, len(self._threads))
        while True:
            left = self._attendance.milliseconds_left(self.clients) if self._attendance is not None else None
            ready = {descriptor for descriptor, _ in poll.poll(left)}
            if self._wake_read in ready:
                os.read(self._wake_read, select.PIPE_BUF)
            if self._stopping or (left == 0 and not ready):  # read after the pipe, so that no `stop` is missed
                return
            for descriptor in ready - {self._wake_read, listener.fileno()}:
                poll.unregister(descriptor)
                self._process_ended(descriptor)
            if listener.fileno() in ready:
                self._accept(listener, poll)

    def _accept(self, listener: socket.socket, poll: select.poll) -> None:
        self._make_room()
        try:
            connection, _ = listener.accept()
        except OSError as error:
            log.warning("cannot accept a client: %s", error)
            stopped = select.poll()
            stopped.register(self._wake_read, select.POLLIN)
            stopped.poll(_FULL_MS)
            return
        pid, user = peer_credentials(connection)
        if user != os.geteuid():
            refuse_user(connection, user)
            return
        if self._attendance is not None:
            descriptor = self._attendance.came(pid)
            if descriptor is not None:
                poll.register(descriptor, select.POLLIN)
        self._admit(connection)

    def _make_room(self) -> None:
        with self._lock:
            silent = [session for session in self._sessions if not session.greeted]
        if len(silent) >= MOST_GREETED:
            longest = min(silent, key=lambda session: session.since)
            if time.monotonic() - longest.since > _SILENT_SECONDS:  # the client may still send its hello
                longest.abandon()

    def _process_ended(self, descriptor: int) -> None:
        """Ends the sessions of an ended process, because a forked child may still hold the process's sockets open."""
        assert self._attendance is not None
        pid = self._attendance.ended(descriptor)
        with self._lock:
            sessions = [session for session in self._sessions if session.pid == pid]
        for session in sessions:
            session.abandon()

    def _admit(self, connection: socket.socket) -> None:
        session = Session(
            connection,
            self._open_runtime,
            self._assign_threads,
            self._choose_idle,
            self.reporter.request,
            self._introductions,
        )
        thread = Thread(self._run, "proxyccl-client", session, failed=lambda _: session.abandon())
        with self._lock:
            self._sessions[session] = thread
        try:
            thread.start()
        except ResourceError as error:
            log.warning("cannot serve a client: %s", error)
            with self._lock:
                del self._sessions[session]
            connection.close()

    def _run(self, session: Session) -> None:
        try:
            session.run()
        finally:
            with self._lock:  # keeps `close` from closing the pipe before the call of `_wake`
                del self._sessions[session]
                if self._attendance is not None:
                    self._attendance.left(suspended=session.suspended)
                if not self._stopping:
                    self._wake()

    def _open_runtime(self, name: str, device_id: str) -> Runtime:
        key = name if name == "host" else device_id  # all devices of the host runtime share one runtime
        with self._lock:
            opening = self._opening[key]
        with opening:
            if key not in self._runtimes:
                self._runtimes[key] = _open_runtime(name, device_id)
            return self._runtimes[key]

    def _assign_threads(self, workers: int) -> Sequence[ProxyThread]:
        """Returns a thread for each worker, chosen among the threads with the fewest workers. A thread occurs twice in
        the result only if there are more workers than threads.
        """
        with self._lock:
            users = [thread for session in self._sessions for thread in session.threads]
            by_load = sorted(self._threads, key=users.count)
            return [by_load[i % len(by_load)] for i in range(workers)]

    def _choose_idle(self) -> IdlePolicy:
        if self._options.idle is not None:
            return self._options.idle
        with self._lock:
            processes = {session.pid or session for session in self._sessions if session.threads}
        cores = os.sched_getaffinity(0).union(self._options.cores or ())
        return choose_idle(len(cores), max(self._options.programs, len(processes)), len(self._threads))

    def close(self) -> None:
        """Finishes the clients' requests, ends the clients' sessions, and stops listening."""
        self._stopping = True
        self._listener.close()
        with self._lock:
            sessions = dict(self._sessions)
        log.info("ending, with %d clients", len(sessions))
        for session in sessions:
            session.end(_DRAIN_SECONDS)
        for thread in sessions.values():
            thread.join(2 * _DRAIN_SECONDS)
        for proxy_thread in self._threads:
            if not proxy_thread.close(_DRAIN_SECONDS):
                log.error("a thread does not end: it is inside a call of the driver")
        self._listener.release()
        self._introductions.close()
        if self._attendance is not None:
            self._attendance.close()
        for descriptor in (self._wake_read, self.wake_descriptor):
            os.close(descriptor)
        log.info("ended")


def _open_runtime(name: str, device_id: str) -> Runtime:
    if name == "host":
        return HostRuntime()
    if name not in ("cuda", "hip"):
        raise ArgumentError("runtime", f"unknown runtime {name!r:.100}; expected one of host, cuda, hip")
    driver = open_driver(name)
    for device in range(driver.device_count()):
        if driver.device(device).device_id == device_id:
            runtime = GpuRuntime(driver, device)
            runtime.context.call(driver.free_stacks)  # this process launches no kernels
            return runtime
    raise ArgumentError(
        "device",
        f"the node daemon does not see {device_id!r:.100}; start it where all of the node's devices are visible",
    )


def raise_descriptor_limit() -> None:
    """Raises the limit of open descriptors to its maximum, because each client's memory takes several descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
