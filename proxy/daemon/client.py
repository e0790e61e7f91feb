"""A rank's side of the node daemon: the same methods as a service of its own, asked for over the socket.

Rings, counters and memories are this process's; the daemon gets descriptors and handles of them. A thread reads what
the daemon says: an answer goes to who asked, and a failure, or the daemon's end, to `on_failure`.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from proxyccl.device._native import lib as native
from proxyccl.device.errors import (
    ArgumentError,
    ClosedError,
    ProxyCCLError,
    ProxyLostError,
    ResourceError,
    RuntimeUnavailableError,
    TransportError,
)
from proxyccl.device.runtime import PinnedMemory, Runtime
from proxyccl.proxy.daemon.client_rdma import DaemonRdma
from proxyccl.proxy.daemon.protocol import (
    LAYOUT,
    VERSION,
    Fields,
    ProtocolError,
    limit_waits,
    peer_credentials,
    receive,
    send,
    socket_path,
)
from proxyccl.proxy.fifo import Fifo
from proxyccl.proxy.interface import (
    ChannelCounters,
    Connection,
    Handle,
    Handler,
    ProxyFailure,
)
from proxyccl.proxy.observe.publications import Description
from proxyccl.proxy.observe.reader import OutstandingView
from proxyccl.proxy.processes import start_of
from proxyccl.proxy.service import ProxyService, SharedWords, require_rings
from proxyccl.proxy.thread import IdlePolicy
from proxyccl.proxy.trigger import Trigger
from proxyccl.proxy.verbs.options import RdmaOptions

_MARGIN = 10.0  # seconds that an answer may take beside what was asked for
_HELLO_SECONDS = 10.0  # that a daemon may take to say that it is there


def connect(path: Path, timeout: float) -> tuple[socket.socket, int]:
    """A connection to the daemon, which has taken the client in, and the daemon's process.

    Raises:
        RuntimeUnavailableError: there is no daemon that would; the message says what to do.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        limit_waits(connection, timeout, timeout)
        connection.connect(os.fspath(path))
        pid, user = peer_credentials(connection)
        refusal = _introduce(connection) if user in (0, os.geteuid()) else f"it belongs to user {user}"
        limit_waits(connection, timeout, 0)
    except (OSError, ProtocolError) as error:
        connection.close()
        raise RuntimeUnavailableError(
            f"no node daemon answers at {path} ({error}); start one with: proxyccl daemon --socket {path}"
        ) from None
    if refusal:
        connection.close()
        raise RuntimeUnavailableError(f"the node daemon at {path} is not for this process: {refusal}")
    return connection, pid


def _introduce(connection: socket.socket) -> str:
    """Says hello. Returns why the daemon does not take this process in; empty if it does."""
    send(connection, {"hello": VERSION, "layout": LAYOUT})
    message = receive(connection)
    if message is None:
        return "it hung up"
    fields, _ = message
    if "error" in fields:
        return fields.text("message")
    version = fields.integer("version")
    return "" if version == VERSION else f"it speaks version {version} of the protocol, this process {VERSION}"


def daemon_process(path: Path) -> int:
    """The process of the daemon that listens at a path.

    Raises:
        RuntimeUnavailableError: none answers.
    """
    connection, process = connect(path, _HELLO_SECONDS)
    connection.close()
    return process


def missing_in_daemon(timeout: float) -> tuple[str, str]:
    """Why this process can't have its proxy in a daemon, and why it can't have RDMA there; empty if it can."""
    try:
        connection, _ = connect(socket_path(), timeout)
    except RuntimeUnavailableError as error:
        return str(error), "there is no node daemon"
    with connection:
        try:
            limit_waits(connection, timeout, timeout)
            send(connection, {"do": "rdma_missing"})
            message = receive(connection)
            return "", "the node daemon hung up" if message is None else message[0].text("missing")
        except (OSError, ProtocolError) as error:
            return "", f"the node daemon does not say: {error}"


class DaemonClient:
    """See `proxyccl.proxy.interface.Proxy` for the methods.

    Args:
        runtime: whose rings the kernels push to.
        shared: pinned memory that begins with the ProxycclControl whose abort word ends the workers.
        shared_offset: of `ProxyService.shared_bytes()` in it.
        fifos: number of rings.
        threads: number of workers, each on a thread of the daemon's as far as it has so many.
        fifo_size: slots in each ring.
        idle: what a thread of this process does that runs handlers; the daemon's threads have the daemon's policy.
        on_failure: called, in a thread of this object's, when a worker ends on an error, and when the daemon is lost.
        description: by which observers and the daemon's log know it.
        timeout: in seconds, of what the daemon is asked.

    Attributes:
        daemon: the daemon's process.
        daemon_started: when that did (`proxyccl.proxy.processes.start_of`).

    Raises:
        ArgumentError: numbers of rings and threads that don't go together, or a device that the daemon does not see.
        RuntimeUnavailableError: there is no daemon, or it refuses this process.
    """

    def __init__(
        self,
        runtime: Runtime,
        shared: PinnedMemory,
        *,
        shared_offset: int,
        fifos: int = 1,
        threads: int = 1,
        fifo_size: int = 8192,
        idle: IdlePolicy | None = None,
        on_failure: Callable[[ProxyFailure], None],
        name: str = "proxyccl",
        description: Description | None = None,
        timeout: float = 30.0,
    ) -> None:
        require_rings(fifos, threads)
        self._runtime = runtime
        self._segment = shared
        self._shared = SharedWords(shared, shared_offset)
        self._on_failure = on_failure
        self._timeout = timeout
        self._handler_options: dict[str, Any] = {
            "fifos": fifos,
            "threads": threads,
            "fifo_size": fifo_size,
            "idle": idle,
            "on_failure": on_failure,
            "description": description,
            "name": name,
        }
        self._handlers: ProxyService | None = None  # runs in this process
        self._handler_words: PinnedMemory | None = None
        self._of_handler: set[int] = set()
        self._ring_of: dict[int, int] = {}
        self._lock = threading.RLock()
        self._answers: queue.SimpleQueue[Fields | None] = queue.SimpleQueue()
        self._requests = itertools.count()
        self._lost = ""
        self._outstanding: OutstandingView | None = None
        self._closed = False
        self._path = socket_path()
        self.fifos = [Fifo(runtime, fifo_size) for _ in range(fifos)]
        self._connection, self.daemon = connect(self._path, timeout)
        self.daemon_started = start_of(self.daemon)
        self._reader = threading.Thread(target=self._read, name=f"{name}-daemon", daemon=True)
        self._reader.start()
        try:
            descriptors = [shared.descriptor, *(fifo.pinned.descriptor for fifo in self.fifos)]
            request: dict[str, Any] = {
                "runtime": runtime.name,
                "device_id": runtime.device_id,
                "fifo_size": fifo_size,
                "threads": threads,
                "shared_offset": shared_offset,
                **(asdict(description) if description is not None else {}),
            }
            answer = self._ask("open", descriptors=descriptors, **request)
            self._outstanding = _open_outstanding(answer.data("observed"), threads)
        except ProxyCCLError:
            self._hang_up()
            raise

    def __repr__(self) -> str:
        return f"<DaemonClient of process {self.daemon} at {self._path}, {len(self.fifos)} rings>"

    def want_report(self, cause: str) -> None:
        """Has the daemon report too. It is not waited for: it may be what hangs."""
        with contextlib.suppress(OSError):  # it is lost, which this rank reports
            send(self._connection, {"do": "report", "cause": cause}, flags=socket.MSG_DONTWAIT)

    # -- the conversation ---

    def _ask(self, request: str, *, takes: float = 0.0, descriptors: Iterable[int] = (), **fields: Any) -> Fields:
        """Sends a request and waits for its answer; the daemon may take so many seconds for it, and then some."""
        with self._lock:
            if self._closed:
                raise ClosedError("the proxy service is closed")
            if self._lost:
                raise self._lost_error(request)
            number = next(self._requests)
            try:
                send(self._connection, {"do": request, "request": number, **fields}, list(descriptors))
                answer = self._answer_to(number, takes + min(self._timeout, _MARGIN))
            except BrokenPipeError:
                self._reader.join(_MARGIN)  # it knows why
                answer = None
            except (OSError, queue.Empty) as error:
                self._lose(f"process {self.daemon} does not answer a request to {request}: {error or 'too late'}")
                answer = None
        if answer is None:
            raise self._lost_error(request)
        if "error" in answer:
            raise _exception(answer)
        return answer

    def _answer_to(self, number: int, timeout: float) -> Fields | None:
        """None where the daemon is lost. The answer to a request that was interrupted (Ctrl-C) may come before."""
        deadline = time.monotonic() + timeout
        while True:
            answer = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            if answer is None or answer.optional("request") in (None, number):
                return answer

    def _is_open(self) -> bool:
        return not self._closed and not self._lost

    def _lost_error(self, request: str) -> ProxyLostError:
        return ProxyLostError(f"the node daemon is lost: {self._lost}", operation=request)

    def _read(self) -> None:
        try:
            while (message := receive(self._connection)) is not None:
                fields, _ = message
                if "event" not in fields:
                    self._answers.put(fields)
                elif fields.text("event") == "failed":
                    self._on_failure(_failure(fields))
                else:
                    self._lose(f"process {self.daemon} was told to end")
            reason = f"process {self.daemon} ended"
        except (OSError, ProtocolError) as error:
            reason = str(error)
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        if self._lost or self._closed:
            return
        self._lost = reason
        self._answers.put(None)
        self._on_failure(ProxyFailure(native.PROXYCCL_ERROR_PROXY_LOST, None, None, 0, reason))

    # -- what is read here, in shared memory ---

    def _words_of(self, channel: int) -> SharedWords | ProxyService:
        return self._handlers if self._handlers is not None and channel in self._of_handler else self._shared

    def fifo_for(self, channel: int) -> Fifo:
        """The ring that a channel's triggers go through."""
        if self._handlers is not None and channel in self._of_handler:
            return self._handlers.fifo_for(channel)
        return self.fifos[self._ring_of[channel]]

    @property
    def rings(self) -> list[Fifo]:
        """All rings of this rank's kernels: those that the daemon drains, and those of handlers."""
        return [*self.fifos, *(self._handlers.rings if self._handlers is not None else ())]

    @property
    def handling(self) -> dict[int, float]:
        """The channel of each handler that runs, and time.monotonic() when it began."""
        return self._handlers.handling if self._handlers is not None else {}

    def flushed(self, channel: int) -> int:
        """One more than the ticket of the last flush that is complete on a channel."""
        return self._words_of(channel).flushed(channel)

    def outstanding(self, channel: int) -> int | None:
        """Triggers of a channel's connection that are issued and not known to be complete; None for a handler, and
        where the daemon's memory can't be opened.
        """
        if self._closed:
            raise ClosedError("the proxy service is closed")
        if channel in self._of_handler or self._outstanding is None:
            return None
        return self._outstanding.of(channel)

    def flushed_pointer(self, channel: int) -> int:
        """The device's address of a channel's flush word."""
        return self._words_of(channel).flushed_pointer(channel)

    @property
    def extents_pointer(self) -> int:
        """The device's address of the table that says for each memory id how many bytes follow it."""
        return self._shared.extents_pointer

    def counters(self, channel: int) -> ChannelCounters:
        """A channel's counters, read without disturbing the proxy."""
        return self._words_of(channel).counters(channel)

    # -- what the daemon does ---

    def add_memory(self, base: int, nbytes: int, key: int = 0, *, handle: Handle | None = None) -> int:
        """Has the daemon map memory, and registers it there.

        Raises:
            ArgumentError: the daemon can't reach it: memory that this process alone has.
            ResourceError: no ids are left.
        """
        if handle is None:
            raise ArgumentError("memory", "the node daemon reaches memory by a handle alone")
        named = handle().hex() if nbytes else ""
        return self._ask("add_memory", handle=named, nbytes=nbytes, key=key).integer("first")

    def add_keyed_memory(self, address: int, nbytes: int, key: int) -> int:
        """Registers memory that RDMA knows by an address and a key. Raises ResourceError when no ids are left."""
        return self._ask("add_keyed_memory", address=address, nbytes=nbytes, key=key).integer("first")

    def remove_memory(self, first: int, nbytes: int) -> None:
        """Gives ids back. No trigger may name them any more."""
        if self._is_open():
            self._ask("remove_memory", first=first)

    def connect_copy(self, *, peer: int | None = None) -> Connection:
        """A connection that copies within the node, from memory that the daemon maps to memory that it maps."""
        answer = self._ask("connect_copy", peer=peer)
        return Connection(answer.integer("number"), answer.integer("worker"), peer, answer.text("transport"))

    def open_rdma(
        self, options: RdmaOptions, signals: range, *, near: int | None = None, local_rank: int = 0
    ) -> DaemonRdma:
        """Has the daemon open an RDMA device for this rank. Arguments and errors as of `Proxy.open_rdma`."""
        rdma = DaemonRdma(self._ask, self._is_open, self._timeout)
        rdma.open(options, signals, near=near, local_rank=local_rank)
        return rdma

    def reserve_channel(self, connection: Connection) -> int:
        """A channel id for a connection's ring. Triggers on it are refused until `set_channel`."""
        answer = self._ask("reserve_channel", connection=connection.number)
        channel, ring = answer.integer("channel"), answer.integer("ring", 0, len(self.fifos) - 1)
        self._ring_of[channel] = ring
        return channel

    def set_channel(
        self, channel: int, connection: Connection, remote_semaphore: int, *, handle: Handle | None = None
    ) -> None:
        """Puts a channel in use. The word that its signals count up is named by `handle` where they are copied, and by
        `remote_semaphore` where they go by RDMA.
        """
        word: dict[str, Any] = {"address": remote_semaphore}
        if connection.transport == "copy":
            if handle is None:
                raise ArgumentError("handle", "the node daemon copies to a semaphore by a handle alone")
            word = {"word": handle().hex()}
        self._ask("set_channel", channel=channel, connection=connection.number, **word)

    def free_channels(self, channels: Iterable[int], connection: Connection) -> None:
        """Gives a connection's channel ids back."""
        if self._is_open():
            self._ask("free_channels", channels=list(channels), connection=connection.number)

    def add_handler(self, handler: Handler) -> int:
        """A channel whose triggers go to a function of this process, through rings and threads of its own."""
        if not callable(handler):
            raise ArgumentError("handler", f"must be callable, not {type(handler).__name__}")
        with self._lock:
            channel = self._ask("reserve_handler").integer("channel")
            if self._handlers is None:
                self._handler_words = self._runtime.allocate_pinned(ProxyService.shared_bytes())
                self._handlers = ProxyService(
                    self._runtime, self._segment.host_ptr, self._handler_words, **self._handler_options
                )
            self._handlers.add_handler(handler, channel)
            self._of_handler.add(channel)
        return channel

    def drain(self, timeout: float, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Waits until what the rings held is done and nothing is outstanding. An abort ends that too."""
        if self._closed or self._lost or given_up():
            return False
        if self._handlers is not None and not self._handlers.drain(timeout, given_up):
            return False
        try:
            answer = self._ask("drain", takes=timeout, timeout=timeout)
        except ProxyLostError:
            return False
        return answer.flag("drained")

    def close(self, timeout: float = 30.0) -> bool:
        """Drains the rings, and has the daemon let go of all that it was given.

        False if a handler, or a worker of the daemon's, did not end in time (what it uses is then kept).
        """
        with self._lock:
            if self._closed:
                return True
            ended = self._handlers is None or self._handlers.close(timeout)
            handlers_ended = ended
            try:
                if not self._lost:
                    ended &= self._ask("close", takes=2 * timeout, timeout=timeout).flag("ended")
            except ProxyLostError:  # then nothing of it runs, or nothing can be done about it
                pass
            finally:
                self._hang_up()
            if handlers_ended and self._handler_words is not None:
                self._handler_words.close()
            return ended

    def _hang_up(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._reader is not threading.current_thread():
            self._reader.join(self._timeout)
        self._connection.close()
        if self._outstanding is not None:
            self._outstanding.close()
        for fifo in self.fifos:
            fifo.close()


def _open_outstanding(handle: bytes, workers: int) -> OutstandingView | None:
    try:
        return OutstandingView(handle.hex(), workers)
    except ArgumentError as error:  # the work goes on without what only reports want
        logging.getLogger("proxyccl").warning("reports can't show what the node daemon has outstanding: %s", error)
        return None


def _failure(fields: Fields) -> ProxyFailure:
    words = fields.integers("trigger")
    return ProxyFailure(
        code=fields.integer("code"),
        channel=fields.optional("channel"),
        trigger=Trigger.decode(*words[:2]) if words else None,
        status=fields.integer("status", -(1 << 31), (1 << 31) - 1),
        reason=fields.text("reason"),
        peer=fields.optional("peer"),
    )


def _exception(answer: Fields) -> ProxyCCLError:
    kind, message = answer.text("error"), answer.text("message")
    if kind == "argument":
        return ArgumentError(answer.text("argument"), message)
    if kind == "resource":
        return ResourceError(message)
    if kind == "unavailable":
        return RuntimeUnavailableError(message)
    if kind == "transport":
        return TransportError(message, operation="connect")
    if kind == "protocol":
        return ProxyLostError(f"the node daemon refuses this process: {message}", operation="proxy")
    return ProxyCCLError(f"the node daemon: {message}")
