"""Serves the page of `proxyccl top --web`, the machine's state as server-sent events, and a trace on request.

Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html

Anybody on the machine may connect, so every request needs the token that is part of the printed URL. `LocalPages`
checks the token first. The Content-Security-Policy prevents the page from exchanging data with other servers.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path

from proxyccl.device.errors import ArgumentError, ProxyCCLError
from proxyccl.device.shown_text import shown_in_json
from proxyccl.proxy.observe.bounded_server import BoundedServer, LocalPages, split_address
from proxyccl.tools import trace
from proxyccl.tools.web.state import STATES, State, States

_MOST_TRACE_SECONDS = 60.0


@contextlib.contextmanager
def serve(address: str, interval: float, job: str | None = None, process: int | None = None) -> Iterator[str]:
    """A context manager that runs a server, and whose value is the server's URL with the token. `address` is HOST:PORT,
    HOST or :PORT; "" means any free port of localhost. `interval` is the time in seconds between two updates of the
    page; `job` and `process` select services (see `find`). Raises ArgumentError if `address` is not an address, and
    ResourceError if the port is in use, or not allowed.
    """
    host, port = split_address(address, 0, "--web")
    token = secrets.token_urlsafe(24)
    with contextlib.closing(_Events(States(job, process), interval)) as events:
        handler = _handler(token, host, events, lambda seconds: _trace(seconds, job, process))
        with BoundedServer(host, port, handler, "proxyccl-web") as server:
            shown = f"[{host}]" if ":" in host else host
            yield f"http://{shown}:{server.port}/?token={token}"


def run(address: str, interval: float, job: str | None, process: int | None) -> int:
    """Runs a server until Ctrl-C. Returns the exit code. Has the arguments and errors of `serve`."""
    with serve(address, interval, job, process) as url, contextlib.suppress(KeyboardInterrupt):
        print(f"{url}\n(Ctrl-C ends it)", flush=True)
        threading.Event().wait()
    return 0


class _Events:
    """The server-sent events that all open pages share. While no page is open, no events are made."""

    def __init__(self, states: States, interval: float) -> None:
        self._states = states
        self._interval = interval
        self._changed = threading.Condition()
        self._number = 0
        self._event = b""
        self._made = -math.inf
        self._closed = False

    def after(self, number: int) -> tuple[int, bytes]:
        with self._changed:
            while self._number <= number or time.monotonic() > self._made + 2 * self._interval:
                if self._closed:
                    raise ConnectionAbortedError("the server has ended")
                left = self._made + self._interval - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                else:
                    self._make()
            return self._number, self._event

    def _make(self) -> None:
        try:
            state = self._states.now()
        except ArgumentError as error:
            state = State(time.strftime("%H:%M:%S"), str(error))
        self._number += 1
        data = shown_in_json(STATES.encode(state).decode())  # JSON without newlines, which would end the event
        self._event = f"data: {data}\n\n".encode()
        self._made = time.monotonic()
        self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _trace(seconds: float, job: str | None, process: int | None) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.write_trace(path, *trace.record(seconds, job, process=process))
        return path.read_bytes()


def _handler(token: str, name: str, events: _Events, record: Callable[[float], bytes]) -> type[LocalPages]:
    recording = threading.Lock()

    class Handler(LocalPages):
        host = name

        def do_GET(self) -> None:  # noqa: N802  the base class's name
            match self._asked():
                case "/":
                    nonce = secrets.token_urlsafe(12)
                    page = resources.files("proxyccl.tools.web").joinpath("page.html").read_text()
                    self._send(page.replace("{nonce}", nonce).encode(), "text/html; charset=utf-8", nonce)
                case "/events":
                    self._send_events()
                case str():
                    self.send_error(404)

        def do_POST(self) -> None:  # noqa: N802  the base class's name
            match self._asked():
                case "/trace":
                    self._send_trace(self.query.get("seconds", ["1"])[0])
                case str():
                    self.send_error(404)

        def _asked(self) -> str | None:
            given = self.query.get("token", [""])[0]
            if hmac.compare_digest(given.encode(), token.encode()):
                return self.path_asked
            self.send_error(403, explain="the token is missing or wrong; use the address that was printed")
            return None

        def _begin(self, kind: str, nonce: str = "") -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("X-Content-Type-Options", "nosniff")
            if nonce:
                self.send_header(
                    "Content-Security-Policy",
                    f"default-src 'none'; connect-src 'self'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; "
                    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
                )

        def _send(self, body: bytes, kind: str, nonce: str = "") -> None:
            self._begin(kind, nonce)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _send_events(self) -> None:
            self._begin("text/event-stream")
            self.end_headers()
            number = 0
            while True:  # this loop ends when the server or the page is closed
                number, event = events.after(number)
                self.wfile.write(event)

        def _send_trace(self, seconds: str) -> None:
            try:
                length = float(seconds)
            except ValueError:
                length = 0.0
            if not 0 < length <= _MOST_TRACE_SECONDS:
                self.send_error(400, explain=f"seconds: expected a time up to {_MOST_TRACE_SECONDS:g}")
            elif not recording.acquire(blocking=False):
                self.send_error(409, explain="a trace is being recorded")
            else:
                try:
                    body = record(length)
                except ProxyCCLError as error:
                    self.send_error(409, explain=str(error))
                else:
                    self._send(body, "application/json")
                finally:
                    recording.release()

    return Handler
