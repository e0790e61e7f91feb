"""Serves one client's connection in the daemon.

The daemon trusts a client's user but not the client's messages: a client can name only objects that the daemon has made
for this client (`SessionService`), and an error ends only this client's session.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Union

from msgspec import Raw, structs

from proxyccl.device.errors import DriverError, ProtocolError, ProxyCCLError, ResourceError
from proxyccl.device.memory.sockets import TOKEN_BYTES, peer_credentials
from proxyccl.device.runtime import Runtime
from proxyccl.proxy.codec import Codec
from proxyccl.proxy.daemon.introductions import Introductions
from proxyccl.proxy.daemon.protocol import (
    DAEMON,
    HELLO_ANSWERS,
    HELLOS,
    LAYOUT,
    LONGEST_FRAME,
    METHODS,
    MOST_DESCRIPTORS,
    REPLIES,
    VERSION,
    Answer,
    AnyReply,
    Descriptors,
    Ending,
    Failed,
    HelloAnswer,
    Introduced,
    Refused,
    Request,
    Warned,
    close_all,
    limit_waits,
    method,
    receive,
    send,
)
from proxyccl.proxy.daemon.session_service import ChannelId, Seconds, ServiceOptions, SessionService
from proxyccl.proxy.interface import ProxyFailure, Signals
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
    """Sends a refusal to a client that runs as another user, and closes the connection without waiting."""
    refusal = HelloAnswer(error="protocol", message=f"this daemon serves user {os.geteuid()}, not {user}")
    with connection:
        with contextlib.suppress(OSError):
            send(connection, HELLO_ANSWERS, refusal, flags=socket.MSG_DONTWAIT)
        with contextlib.suppress(OSError, ProtocolError):  # closing a socket with unread data would discard the refusal
            message = receive(connection, HELLOS, f"user {user}", socket.MSG_DONTWAIT)
            close_all(message[1] if message is not None else [])


class Session:
    """Serves one connection of a client, from the client's hello to the connection's end.

    Args:
        connection: the socket; the session closes it.
        open_runtime: returns the runtime for a name and a device_id.
        assign_threads: returns the threads for this number of workers.
        choose_idle: returns the idle policy for a client that requests no policy.
        request_report: called with a job and a cause when the client asks for a report; must not wait.
        introductions: connects the client to other processes.
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
        self._service: SessionService | None = None
        self._number: int | None = None  # number of the request in progress
        self._answered = False
        self.greeted = False  # whether both hellos have been exchanged
        self.suspended = False  # whether the client has called `suspend`
        self._end_within: float | None = None
        self.threads: Sequence[ProxyThread] = ()  # the threads that run the client's workers
        self.name = "a client"  # the client's name in logs and errors
        self.pid: int | None = None
        # The rank that the proxy works for; None until a proxy is open, or if the client gave no description.
        self.description: Description | None = None
        self.device_id = ""
        self.since = time.monotonic()  # time.monotonic() when the client connected
        # Name of the method whose request is in progress, and time.monotonic() when the request arrived; None without a
        # request.
        self.request: tuple[str, float] | None = None
        # The failure of the worker that failed last; None if no worker has failed.
        self.failure: ProxyFailure | None = None
        # The client's proxy, whose state can be read even after the proxy has ended.
        self.served: ProxyService | None = None

    def run(self) -> None:
        """Serves the client until it disconnects or violates the protocol, or until `end` is called."""
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

    def end(self, timeout: float) -> None:
        """Makes the session finish the triggers in the client's rings, then end. Any thread may call this method."""
        self._end_within = timeout
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)

    def abandon(self) -> None:
        """Ends the session as if the client had disconnected. Any thread may call this method."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _has_left(self) -> bool:
        return bool(self._hung_up.poll(0))

    # -- frames ---

    def _greet(self) -> bool:
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
        self.greeted = True
        return True

    def _answer_requests(self) -> None:
        while (message := self._next_request()) is not None:
            handed: list[int] = []
            try:
                answer = self._answer(*message, handed)
                if answer is not None:
                    send(self._connection, REPLIES, answer, handed)
            finally:
                close_all(handed)

    def _next_request(self) -> tuple[Request, list[int]] | None:
        while self._service is not None and self._service.memories.unmaps_later and not self._arrived.poll(_QUIET_MS):
            self._service.memories.unmap_if_quiet()
        return receive(self._connection, REQUESTS, self.name)

    def _answer(self, request: Request, descriptors: list[int], handed: list[int]) -> AnyReply | None:
        """Carries out a request. Returns the answer, and adds the answer's descriptors to `handed`. Returns None if the
        answer has been sent already or the client expects no answer.
        """
        called = request.method
        self._number, self._answered = request.request, not called.answered
        if called.answered:
            self.request = called.name, time.monotonic()
        try:
            target = self if hasattr(Session, called.name) else self._require_service(called.name)
            result = called.call(target, request, descriptors)
            if called.returns_descriptors:
                handed += result
                result = None
            return None if self._answered else Answer(Raw(called.result.encode(result)), request=self._number)
        except ProtocolError:
            raise
        except ProxyCCLError as error:
            refused = Refused.of(error)
        except OSError as error:  # the daemon itself has a problem, such as a lack of descriptors
            refused = Refused.of(ResourceError(f"{DAEMON} can't do {called.name}: {error}"))
        finally:
            self.request = None
            close_all(descriptors)
        return structs.replace(refused, request=self._number)

    def _require_service(self, called: str) -> SessionService:
        if self._service is None:
            raise ProtocolError(f"{called}: no proxy is open; expected open first")
        return self._service

    def _confirm(self) -> None:
        self._answered = True
        self._send_event(Answer(Raw(b"null"), request=self._number))

    def _hand(self, theirs: socket.socket) -> None:
        send(self._connection, REPLIES, Introduced(), [theirs.fileno()], socket.MSG_DONTWAIT)

    def _send_event(self, event: AnyReply) -> None:
        """Sends an event without waiting for the client, because this thread may also run other clients' workers."""
        try:
            send(self._connection, REPLIES, event, flags=socket.MSG_DONTWAIT)
        except OSError:
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)

    def _refuse(self, error: ProtocolError) -> None:
        with contextlib.suppress(OSError):
            if self.greeted:
                send(self._connection, REPLIES, Refused.of(error), flags=socket.MSG_DONTWAIT)
            else:
                refusal = HelloAnswer(error="protocol", message=str(error))
                send(self._connection, HELLO_ANSWERS, refusal, flags=socket.MSG_DONTWAIT)

    def _announce_end(self, timeout: float) -> None:
        if self._service is not None and not self._service.proxy.drain(timeout):
            log.warning("%s: the triggers in its rings were not done within %g s", self.name, timeout)
        self._send_event(Ending())

    # -- methods ---

    @method()
    def remote_missing(self) -> dict[str, str]:
        """Returns, for each remote transport, the requirements that the daemon lacks, as text; "" if none."""
        return missing_transports()

    @method(answered=False)
    def write_report(self, cause: str) -> None:
        """Makes the daemon write a report; `cause` is the reason in words."""
        job = self.description.job if self.description is not None else self.name
        self._request_report(job, f"{self.name}: {cause:.200}")

    @method()
    def offer(self, process: str) -> None:
        """Lets other processes connect to the client's process: for each connection the daemon sends an `Introduced`
        event. `process` is the token of the client's process, in hexadecimal.
        """
        self._offered = _token(process)
        self._introductions.offer(self._offered, self._hand, self._confirm)

    @method()
    def reach(self, process: str) -> Descriptors:
        """Returns a connection to the process with this token (in hexadecimal): the daemon, or a caller of `offer`."""
        return [self._introductions.reach(_token(process)).detach()]

    @method()
    def prepare(self, runtime: str, device_id: str, peers: list[str]) -> None:
        """Opens the client's device, and prepares copies between this device and the peers' devices."""
        opened = self._open_runtime(runtime, device_id)
        try:
            opened.warm_up(peers)
        except DriverError as error:  # ignored, because the client's copies may succeed without a warm-up
            log.warning("%s: its first copies will take longer: %s", self.name, error)

    @method(opens=True)
    def open(self, descriptors: Descriptors, options: ServiceOptions) -> tuple[bytes, list[bytes]]:
        """Opens a proxy service that uses the client's control segment and rings, and drains the rings after
        `SessionService.start`. Returns the handle of the service's `ObservedSegment`, and the handles of the words that
        wake the service's threads.
        """
        if self._service is not None:
            raise ProtocolError("open: a proxy is open already")
        count = len(descriptors)
        if not options.threads < count <= MOST_DESCRIPTORS:
            raise ProtocolError(
                f"open came with {count} descriptors; expected a segment and {options.threads} to "
                f"{MOST_DESCRIPTORS - 1} rings"
            )
        runtime = self._open_runtime(options.runtime, options.device_id)
        self.threads = self._assign_threads(options.threads)
        idle = IdlePolicy(*options.idle) if options.idle is not None else self._choose_idle()
        self._service = SessionService(
            options, descriptors, runtime, self.threads, idle, self._send_failure, self._send_warning, self._has_left
        )
        self.served, self.description, self.device_id = self._service.proxy, options.description, runtime.device_id
        if options.description is not None:
            self.name += f" (rank {options.description.rank} of job {options.description.job})"
        log.info("%s: %d rings of %d slots on %s", self.name, count - 1, options.fifo_size, runtime.device_id)
        return self._service.proxy.observed_handle, self._service.proxy.asleep_handles

    @method(timeouts=2, needs_turns=True)
    def close(self, timeout: Seconds) -> bool:
        """Drains the rings and frees all of the client's objects. Returns whether all workers have ended."""
        self._require_service("close").drain(timeout)
        return self._free(timeout)

    @method(timeouts=2, needs_turns=True)
    def suspend(self, timeout: Seconds) -> dict[ChannelId, Signals]:
        """Drains the rings and frees all of the client's objects, which the client will make again over another
        connection. Returns the signals of the client's channels. A job's own daemon without other clients ends at once.
        Raises ResourceError if the client's work does not end in time.
        """
        self.suspended, service = True, self._service
        if service is None:
            return {}
        drained = service.drain(timeout)
        signals = service.signals()
        if not drained or not self._free(timeout):
            raise ResourceError(f"the proxy's work did not end within {timeout:g} s")
        return signals

    # -- the end ---

    def _send_failure(self, failure: ProxyFailure) -> None:
        log.warning("%s: its proxy failed: %s", self.name, failure.reason)
        self.failure = failure
        self._send_event(Failed(structs.replace(failure, exception=None)))

    def _send_warning(self, text: str) -> None:
        log.warning("%s: %s", self.name, text)
        with contextlib.suppress(OSError):  # a client that receives nothing at the moment must not lose its proxy
            send(self._connection, REPLIES, Warned(text), flags=socket.MSG_DONTWAIT)

    def _free(self, timeout: float) -> bool:
        """Ends the workers immediately, and frees all of the client's objects. If a worker did not end in time, returns
        False and keeps the client's memory.
        """
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
    try:
        token = bytes.fromhex(process)
    except ValueError:
        token = b""
    if len(token) != TOKEN_BYTES:
        raise ProtocolError(f"process: expected {2 * TOKEN_BYTES} hexadecimal digits, not {process!r:.100}")
    return token


REQUESTS = Codec[Request](Union[tuple(each.request for each in METHODS.values())], LONGEST_FRAME, name="request")  # noqa: UP007  the types are in a tuple
