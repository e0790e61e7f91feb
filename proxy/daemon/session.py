"""The daemon's conversation with one client.

The daemon trusts a client's user but nothing that the client sends: a client can name only objects that it
was given (`SessionService`), and an error ends only its session.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Sequence

from msgspec import structs

from proxyccl.device.errors import DriverError, ProtocolError, ProxyCCLError, ResourceError
from proxyccl.device.memory.sockets import TOKEN_BYTES, peer_credentials
from proxyccl.device.runtime import Runtime
from proxyccl.proxy.daemon.frames import close_all, limit_waits, receive, send
from proxyccl.proxy.daemon.introductions import Introductions
from proxyccl.proxy.daemon.protocol import (
    HELLO_ANSWERS,
    HELLOS,
    LAYOUT,
    REPLIES,
    REQUESTS,
    VERSION,
    AnyReply,
    AnyRequest,
    Close,
    Closed,
    Done,
    Ending,
    Failed,
    HelloAnswer,
    Introduced,
    Missing,
    Offer,
    Open,
    Opened,
    Prepare,
    Reach,
    Reached,
    Refused,
    RemoteMissing,
    ServiceRequest,
    WriteReport,
)
from proxyccl.proxy.daemon.session_service import SessionService, require_descriptors
from proxyccl.proxy.interface import ProxyFailure
from proxyccl.proxy.observe.publications import Description
from proxyccl.proxy.processes import process_name
from proxyccl.proxy.service import ProxyService
from proxyccl.proxy.thread import IdlePolicy, ProxyThread
from proxyccl.proxy.transports.table import missing_transports

HELLO_SECONDS = 10
_ANSWER_SECONDS = 10
_END_SECONDS = 10.0
_QUIET_MS = 20

log = logging.getLogger("proxyccl.daemon")


def refuse_user(connection: socket.socket, user: int) -> None:
    """Tells a client of another user that it is not served, and hangs up. It does not wait."""
    refusal = HelloAnswer(error="protocol", message=f"this daemon serves user {os.geteuid()}, not {user}")
    with connection:
        with contextlib.suppress(OSError):
            send(connection, HELLO_ANSWERS, refusal, flags=socket.MSG_DONTWAIT)
        with contextlib.suppress(OSError, ProtocolError):  # closing a socket with unread data would discard the refusal
            message = receive(connection, HELLOS, f"user {user}", socket.MSG_DONTWAIT)
            close_all(message[1] if message is not None else [])


class Session:
    """One connection of a client, from its hello to its end.

    Args:
        connection: the socket; the session closes it.
        open_runtime: returns the runtime of a name and a device_id.
        assign_threads: returns the threads that run this number of workers.
        choose_idle: returns the idle policy for a client that needs none.
        request_report: called with a job and a cause when the client asks for a report; it must not wait.
        introductions: the daemon's.

    Attributes:
        name: the client, for logs and errors.
        pid: its process.
        description: the rank that its proxy works for; None until it opens one, or if the client does not say.
        device_id: of its device.
        since: time.monotonic() when it connected.
        request: name of the request in progress, and time.monotonic() when it arrived.
        failure: that of its last failed worker.
        served: its proxy; kept for inspection after it is closed.
        threads: the threads that run its workers.
    """

    def __init__(
        self,
        connection: socket.socket,
        open_runtime: Callable[[str, str], Runtime],
        assign_threads: Callable[[int], Sequence[ProxyThread]],
        choose_idle: Callable[[], IdlePolicy],
        request_report: Callable[[str, str], None],
        introductions: Introductions,
    ) -> None:
        self._connection = connection
        self._hung_up = select.poll()
        self._hung_up.register(connection, select.POLLRDHUP)
        self._arrived = select.poll()
        self._arrived.register(connection, select.POLLIN)
        self._open_runtime = open_runtime
        self._assign_threads = assign_threads
        self._choose_idle = choose_idle
        self._request_report = request_report
        self._introductions = introductions
        self._offered: bytes | None = None
        self._handed: list[int] = []
        self._service: SessionService | None = None
        self._greeted = False
        self._end_within: float | None = None
        self.threads: Sequence[ProxyThread] = ()
        self.name = "a client"
        self.pid: int | None = None
        self.description: Description | None = None
        self.device_id = ""
        self.since = time.monotonic()
        self.request: tuple[str, float] | None = None
        self.failure: ProxyFailure | None = None
        self.served: ProxyService | None = None

    def run(self) -> None:
        """Serves the client until it leaves, breaks the protocol, or `end` is called."""
        try:
            try:
                if self._greet():
                    self._answer_requests()
                if self._end_within is not None:
                    self._announce_end(self._end_within)
            except ProtocolError as error:
                log.warning("%s is disconnected: %s", self.name, error)
                self._refuse(error)
            except OSError as error:
                log.info("the connection to %s is lost: %s", self.name, error)
        finally:
            self._close()

    @property
    def greeted(self) -> bool:
        """Whether hellos were exchanged."""
        return self._greeted

    def end(self, timeout: float) -> None:
        """Ends the session, in its own thread: the triggers in the client's rings are done first. From any thread."""
        self._end_within = timeout
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)

    def abandon(self) -> None:
        """Ends the session as if the client had hung up. From any thread."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _has_left(self) -> bool:
        return bool(self._hung_up.poll(0))

    # -- frames ---

    def _greet(self) -> bool:
        """Exchanges hellos. False if the client hung up instead."""
        limit_waits(self._connection, _ANSWER_SECONDS, HELLO_SECONDS)
        self.pid, _ = peer_credentials(self._connection)
        self.name = process_name(self.pid)
        message = receive(self._connection, HELLOS, self.name)
        if message is None:
            return False
        hello, descriptors = message
        close_all(descriptors)
        if hello.hello != VERSION:
            raise ProtocolError(f"version: the daemon speaks {VERSION}, the client {hello.hello}")
        if hello.layout != LAYOUT:
            raise ProtocolError("layout: the daemon and the client are of different builds of ProxyCCL")
        send(self._connection, HELLO_ANSWERS, HelloAnswer(version=VERSION, pid=os.getpid()))
        limit_waits(self._connection, _ANSWER_SECONDS, 0)
        self._greeted = True
        return True

    def _answer_requests(self) -> None:
        while (message := self._next_request()) is not None:
            answer = self._answer(*message)
            try:
                if answer is not None:
                    send(self._connection, REPLIES, answer, self._handed)
            finally:
                close_all(self._handed)

    def _next_request(self) -> tuple[AnyRequest, list[int]] | None:
        """The next request; None if the client hung up. Until it comes, tries to unmap what the client has removed."""
        while self._service is not None and self._service.unmaps_later and not self._arrived.poll(_QUIET_MS):
            self._service.unmap_if_quiet()
        return receive(self._connection, REQUESTS, self.name)

    def _answer(self, request: AnyRequest, descriptors: list[int]) -> AnyReply | None:
        """Carries out a request, or answers with the reason. None if the client has its answer or expects none."""
        answer: AnyReply | None
        try:
            if isinstance(request, WriteReport):
                job = self.description.job if self.description is not None else self.name
                self._request_report(job, f"{self.name}: {request.cause:.200}")
                return None
            self.request = request.name, time.monotonic()
            answer = self._do(request, descriptors)
        except ProtocolError:
            raise
        except ProxyCCLError as error:
            answer = Refused.of(error)
        except OSError as error:  # the daemon's own problem, such as a lack of descriptors
            answer = Refused.of(ResourceError(f"the node daemon can't do {request.name}: {error}"))
        finally:
            self.request = None
            close_all(descriptors)
        return None if answer is None else structs.replace(answer, request=request.request)

    def _do(
        self,
        request: RemoteMissing | Offer | Reach | Prepare | Open | Close | ServiceRequest,
        descriptors: list[int],
    ) -> AnyReply | None:
        """The answer; None if it was sent."""
        match request:
            case Offer(process=process):
                self._offered = _token(process)
                confirm = functools.partial(self._send_event, Done(request=request.request))
                self._introductions.offer(self._offered, self._hand, confirm)
                return None
            case Reach(process=process):
                self._handed.append(self._introductions.reach(_token(process)).detach())
                return Reached()
            case RemoteMissing():
                return Missing(missing_transports())
            case Prepare(runtime=runtime, device_id=device_id, peers=peers):
                self._prepare(self._open_runtime(runtime, device_id), peers)
                return Done()
            case Open():
                return self._open(request, descriptors)
        if self._service is None:
            raise ProtocolError(f"{request.name}: no proxy is open; expected open first")
        if isinstance(request, Close):
            self._service.drain(request.timeout)
            return Closed(self._free(request.timeout))
        return self._service.handle(request)

    def _hand(self, theirs: socket.socket) -> None:
        """Hands the client one end of a connection. From any thread."""
        send(self._connection, REPLIES, Introduced(), [theirs.fileno()], socket.MSG_DONTWAIT)

    def _send_event(self, event: Failed | Ending | Done) -> None:
        """Sends without waiting for the client to read: other clients' workers may share the caller's thread."""
        try:
            send(self._connection, REPLIES, event, flags=socket.MSG_DONTWAIT)
        except OSError:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _refuse(self, error: ProtocolError) -> None:
        """Reports why the session ends."""
        with contextlib.suppress(OSError):
            if self._greeted:
                send(self._connection, REPLIES, Refused.of(error), flags=socket.MSG_DONTWAIT)
            else:
                refusal = HelloAnswer(error="protocol", message=str(error))
                send(self._connection, HELLO_ANSWERS, refusal, flags=socket.MSG_DONTWAIT)

    def _announce_end(self, timeout: float) -> None:
        if self._service is not None and not self._service.proxy.drain(timeout):
            log.warning("%s: the triggers in its rings were not done within %g s", self.name, timeout)
        self._send_event(Ending())

    # -- the service ---

    def _prepare(self, runtime: Runtime, peers: Sequence[str]) -> None:
        try:
            runtime.warm_up(peers)
        except DriverError as error:  # not for certain one of what the client will do
            log.warning("%s: its first copies will take longer: %s", self.name, error)

    def _open(self, request: Open, descriptors: list[int]) -> Opened:
        if self._service is not None:
            raise ProtocolError("open: a proxy is open already")
        require_descriptors(request, len(descriptors))
        runtime = self._open_runtime(request.runtime, request.device_id)
        self.threads = self._assign_threads(request.threads)
        idle = IdlePolicy(*request.idle) if request.idle is not None else self._choose_idle()
        self._service = SessionService(
            request, descriptors, runtime, self.threads, idle, self._send_failure, self._has_left
        )
        self.served, self.description, self.device_id = self._service.proxy, request.description, runtime.device_id
        if request.description is not None:
            self.name += f" (rank {request.description.rank} of job {request.description.job})"
        rings = len(descriptors) - 1
        log.info("%s: %d rings of %d slots on %s", self.name, rings, request.fifo_size, runtime.device_id)
        return Opened(self._service.proxy.observed_handle, self._service.proxy.asleep_handles)

    def _send_failure(self, failure: ProxyFailure) -> None:
        log.warning("%s: its proxy failed: %s", self.name, failure.reason)
        self.failure = failure
        self._send_event(Failed.of(failure))

    def _free(self, timeout: float) -> bool:
        """Ends the workers at once and frees everything. False if a worker did not end: its memory is then kept."""
        service = self._service
        if service is None:
            return True
        if not service.proxy.close(timeout, drained=False):
            return False
        self._service = None
        service.free()
        return True

    def _close(self) -> None:
        self.request = "leave", time.monotonic()
        if self._offered is not None:
            self._introductions.withdraw(self._offered, self._hand)
        try:
            if not self._free(_END_SECONDS):
                log.error("%s: its worker does not end; its memory is kept", self.name)
        except ProxyCCLError as error:
            log.warning("%s: not everything that it used could be freed: %s", self.name, error)
        finally:
            self._connection.close()
        log.log(logging.INFO if self.threads else logging.DEBUG, "%s has left", self.name)


def _token(process: str) -> bytes:
    """The token of a process in a request. Raises ProtocolError for another text."""
    try:
        token = bytes.fromhex(process)
    except ValueError:
        token = b""
    if len(token) != TOKEN_BYTES:
        raise ProtocolError(f"process: expected {2 * TOKEN_BYTES} hexadecimal digits, not {process!r:.100}")
    return token
