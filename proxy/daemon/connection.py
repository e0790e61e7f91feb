"""A rank's connection to the node daemon: exchanges requests and answers, receives events, notices its loss."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from msgspec import structs

from proxyccl.device._native import lib as native
from proxyccl.device.errors import (
    ClosedError,
    ProtocolError,
    ProxyCCLError,
    ProxyLostError,
    ResourceError,
    RuntimeUnavailableError,
)
from proxyccl.device.memory.sockets import peer_credentials
from proxyccl.device.process import forks
from proxyccl.device.process.threads import Thread
from proxyccl.proxy.daemon.hello import DaemonAddress, ask_first, introduce
from proxyccl.proxy.daemon.introduced import offer
from proxyccl.proxy.daemon.protocol import (
    DAEMON,
    METHODS,
    REPLIES,
    Answer,
    AnyReply,
    Ending,
    Failed,
    Method,
    Refused,
    Request,
    Warned,
    limit_waits,
    receive,
    send,
    socket_path,
)
from proxyccl.proxy.daemon.session import REQUESTS, Session
from proxyccl.proxy.interface import ProxyFailure, issue_warning
from proxyccl.proxy.processes import is_stopped, process_name, start_of
from proxyccl.proxy.shared_words import TurnWatch
from proxyccl.proxy.transports.table import TRANSPORTS

_MARGIN = 10.0  # seconds to wait for an answer, in addition to the time that the request itself takes
_HELLO_SECONDS = 10.0
_LOOK_SECONDS = 0.05  # seconds between two checks that the proxy's workers make progress
_STOPPED = "is stopped, and SIGCONT lets it go on"

P = ParamSpec("P")
R = TypeVar("R")


class NodeDaemon(DaemonAddress):
    """The node daemon that listens at a path. See `DaemonAddress`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def connect(self, timeout: float) -> tuple[socket.socket, int]:
        try:
            connection, answer = introduce(os.fspath(self._path), timeout)
        except BlockingIOError:
            raise RuntimeUnavailableError(
                f"the node daemon at {self} has not answered within {timeout:g} s; is its process stopped?"
            ) from None
        except (OSError, ProtocolError) as error:
            raise RuntimeUnavailableError(
                f"no node daemon answers at {self} ({error}); start one with: proxyccl daemon --socket {self}"
            ) from None
        process, _ = peer_credentials(connection)
        if process != answer.pid:  # the daemon's PID namespace differs from this process's
            try:
                offer(self._path, timeout)
            except ProxyCCLError:
                connection.close()
                raise
        return connection, process


def daemon_process(path: Path) -> int:
    """Returns the process id of the daemon that listens at a path. Raises the errors of `DaemonAddress.connect`."""
    connection, process = NodeDaemon(path).connect(_HELLO_SECONDS)
    connection.close()
    return process


def missing_in_daemon(timeout: float) -> tuple[str, dict[str, str]]:
    """Returns the reason why this process can't use the daemon ("" if it can), and, for each remote transport, the
    requirements that the daemon lacks ("" if none).
    """
    remote_transports = [name for name, transport in TRANSPORTS.items() if transport.is_remote]
    try:
        connection, _ = NodeDaemon(socket_path()).connect(timeout)
    except RuntimeUnavailableError as error:
        return str(error), dict.fromkeys(remote_transports, "there is no node daemon")
    with connection:
        limit_waits(connection, timeout, timeout)
        try:
            missing = ask_first(connection, Session.remote_missing)
        except (OSError, ProxyCCLError) as error:
            return "", dict.fromkeys(remote_transports, f"{DAEMON} does not answer remote_missing: {error}")
    return "", {name: missing.get(name, f"{DAEMON} has no such transport") for name in remote_transports}


def prepare_device(connection: socket.socket, timeout: float, runtime: str, device_id: str, peers: list[str]) -> None:
    """Calls the daemon's `Session.prepare` over a new connection.

    Raises:
        ArgumentError: the daemon can't access the device; the error's `argument` is "device".
        ProxyLostError: the daemon does not answer.
        ProxyCCLError: the daemon's error.
    """
    limit_waits(connection, timeout, timeout + min(timeout, _MARGIN))
    try:
        ask_first(connection, Session.prepare, runtime, device_id, peers)
    except (OSError, ProtocolError) as error:
        raise ProxyLostError(f"{DAEMON} does not prepare this rank's device: {error}", operation="prepare") from None
    limit_waits(connection, timeout, 0)


class DaemonConnection:
    """Sends requests to a daemon: one at a time, from any thread. A separate thread reads the daemon's messages. Raises
    RuntimeUnavailableError if there is no daemon, or the daemon does not accept this process, and ResourceError if
    there are too few descriptors, or there is no memory for a thread.

    Args:
        timeout: returns the seconds that the daemon may take for an answer, in addition to the time that the request
            needs; values above 10 s are treated as 10 s.
        name: prefix of the name of the thread that reads the daemon's messages.
        on_failure: called when a worker fails and when the daemon is lost, usually in the reading thread.
        watch_turns: returns a new `TurnWatch` of this rank's workers, for methods whose `needs_turns` is set.
        address: the daemon's address, which `hang_up` closes; None for the node daemon at the default socket.
    """

    def __init__(
        self,
        timeout: Callable[[], float],
        name: str,
        on_failure: Callable[[ProxyFailure], None],
        watch_turns: Callable[[], TurnWatch],
        address: DaemonAddress | None = None,
    ) -> None:
        self._timeout = timeout
        self._on_failure = on_failure
        self._watch_turns = watch_turns
        self._lock = threading.RLock()
        # An RLock lets a signal handler make a request while the interrupted thread is making a request.
        self._news = threading.Condition()
        self._answers: list[AnyReply] = []
        self._numbers = itertools.count()
        self._awaited: set[int] = set()  # the numbers of unanswered requests
        self._lost = ""
        self.is_closed = False  # whether this process has closed the connection
        self._process = forks.here()
        self.address = address or NodeDaemon(socket_path())
        self._socket, self.daemon = self.address.connect(timeout())  # `daemon` is the daemon's process id
        self.daemon_started = start_of(self.daemon)
        self._reader = Thread(
            self._read, f"{name}-daemon", failed=lambda error: self._lose(f"its reader has failed: {error!r}")
        )
        try:
            self._reader.start()
        except ResourceError:
            self._socket.close()
            self.address.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether the daemon is not lost, and this process has not closed the connection."""
        return not self.is_closed and not self._lost

    def ask(self, function: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Calls a method of the daemon (`proxyccl.proxy.daemon.protocol.method`). Returns the method's result.

        Raises:
            ClosedError: this process has closed the connection, or is a fork of the process that opened the connection.
            ProxyLostError: the daemon is lost or violates the protocol.
            ProxyCCLError: the daemon's error.
        """
        method = METHODS[function.__name__]
        nothing: Any = None
        if method.releases and not self.is_open:
            return cast(R, nothing)
        try:
            return cast(R, self._result(method, *method.request_of(args, kwargs)))
        except ProxyLostError:
            if not method.releases:  # a lost daemon has already released the objects
                raise
            return cast(R, nothing)

    def _result(self, method: Method, request: Request, descriptors: Sequence[int]) -> object:
        self._process.require("the proxy service")
        with self._lock:
            if self.is_closed:
                raise ClosedError("the proxy service is closed")
            answer = self._exchange(method, request, descriptors) if not self._lost else None
            if answer is None and self.is_closed:  # a signal handler has closed the connection
                raise ClosedError("the proxy service is closed")
        if isinstance(answer, Refused):
            raise answer.exception()
        if isinstance(answer, Answer):
            try:
                return method.result.decode(answer.result, DAEMON)
            except ProtocolError as error:
                self._lose(str(error))
        elif answer is not None:
            self._lose(f"{process_name(self.daemon)} answered {method.name} with {answer!r:.100}")
        raise ProxyLostError(f"{DAEMON} is lost: {self._lost}", operation=method.name)

    def _exchange(self, method: Method, request: Request, descriptors: Sequence[int]) -> AnyReply | None:
        takes = method.timeouts * getattr(request, "timeout", 0.0) + (self._timeout() if method.opens else 0.0)
        turns = self._watch_turns() if method.needs_turns else None
        number = next(self._numbers)
        self._awaited.add(number)  # a signal handler may make a request during the send below
        try:
            send(self._socket, REQUESTS, structs.replace(request, request=number), descriptors)
            return self._answer_to(number, takes + min(self._timeout(), _MARGIN), turns)
        except BrokenPipeError:
            self._reader.join(_MARGIN)  # the reading thread determines the reason of the loss
        except OSError as error:
            self.give_up(f"does not answer a request to {method.name}: {str(error) or 'too late'}")
        finally:
            self._awaited.remove(number)
        return None

    def _answer_to(self, number: int, timeout: float, turns: TurnWatch | None) -> AnyReply | None:
        deadline = time.monotonic() + timeout
        with self._news:
            while True:
                for answer in self._answers:
                    if answer.request in (None, number):
                        self._answers.remove(answer)
                        return answer
                if not self.is_open:
                    return None
                left = deadline - time.monotonic()
                if left <= 0 or (turns is not None and turns.look() > self._timeout()):
                    raise TimeoutError
                self._news.wait(left if turns is None else min(left, _LOOK_SECONDS))

    def _arrive(self, answer: AnyReply) -> None:
        with self._news:
            known = (*self._answers, answer)
            self._answers = [each for each in known if each.request is None or each.request in self._awaited]
            self._news.notify_all()

    def request_report(self, cause: str) -> None:
        """Asks the daemon to write a report, without waiting for an answer, because the daemon may hang."""
        with contextlib.suppress(OSError):  # if the daemon is lost, this rank's own report says so
            request, _ = METHODS["write_report"].request_of((cause,), {})
            send(self._socket, REQUESTS, request, flags=socket.MSG_DONTWAIT)

    def _read(self) -> None:
        try:
            while (message := receive(self._socket, REPLIES, DAEMON)) is not None:
                reply, _ = message
                match reply:
                    case Failed():
                        self._on_failure(reply.failure)
                    case Warned():
                        issue_warning(reply.text)
                    case Ending():
                        self._lose(f"{process_name(self.daemon)} is ending")
                    case _:
                        self._arrive(reply)
            reason = f"{process_name(self.daemon)} ended"
            words = self.address.last_words()
            reason += f": {words}" if words else ""
        except (OSError, ProtocolError) as error:
            reason = str(error)
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        if self._lost or self.is_closed:
            return
        self._lost = reason
        with self._news:
            self._news.notify_all()
        self._on_failure(ProxyFailure(native.PROXYCCL_ERROR_PROXY_LOST, None, None, 0, reason))

    def give_up(self, what: str) -> None:
        """Treats the daemon as lost, even if it is alive. The error's text is the process's name followed by `what`."""
        stopped = f"; it {_STOPPED}" if is_stopped(self.daemon) else ""
        self._lose(f"{process_name(self.daemon)} {what}{stopped}")

    def stopped(self) -> str:
        """See `ProxyService.stopped`. Returns "" also if the daemon is lost."""
        return f"{process_name(self.daemon)} {_STOPPED}" if self.is_open and is_stopped(self.daemon) else ""

    def close_service(self, timeout: float) -> bool:
        """Makes the daemon drain the rings and free all of this client's objects, then closes the connection. Returns
        whether all workers ended in time; True if the daemon is lost.
        """
        if not self._process.is_here:
            return True
        with self._lock:
            try:
                return self.ask(Session.close, timeout)
            except ProxyLostError:
                return True
            finally:
                self.hang_up()

    def hang_up(self) -> None:
        """Closes the socket and ends the reading thread."""
        self.is_closed = True
        with self._news:
            self._news.notify_all()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._reader is not threading.current_thread():
            self._reader.join(self._timeout())
        self._socket.close()
        self.address.close()
