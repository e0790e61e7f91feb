"""Serves short connections from this machine, for the metrics, for RAS clients and for the page of `top --web`.

`LocalPages.parse_request` checks every HTTP request, whatever its method and path. The Host header must name this
machine, so that a web page can't access the server by a foreign name that resolves to the loopback address (DNS
rebinding).
"""

from __future__ import annotations

import contextlib
import ipaddress
import platform
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from socketserver import BaseRequestHandler, ThreadingTCPServer
from typing import Any
from urllib.parse import parse_qs

from proxyccl.device.arguments.integers import as_integer
from proxyccl.device.errors import ArgumentError, ResourceError
from proxyccl.device.process.threads import Thread

_LINGER_SECONDS = 1.0
_LINGER_BYTES = 1 << 20


class BoundedServer(ThreadingTCPServer):
    """Serves at most `MOST` connections at a time, each in a thread. A further connection ends the oldest connection,
    so silent clients do not block the server.

    Use the server as a context manager, or call `end`. Raises ArgumentError if the port is not from 0 to 65535, or the
    host has no address, and ResourceError if the port is in use, or this process may not use it.

    Args:
        host: name or address to listen at.
        port: the port; 0 for any free port.
    """

    daemon_threads = True
    allow_reuse_address = True  # allows reuse of a port whose old connections are in TIME_WAIT
    MOST = 32
    request_queue_size = MOST

    def __init__(self, host: str, port: int, handler: type[BaseRequestHandler], name: str) -> None:
        port = as_integer(port, "port", "must be from 0 to 65535", 0, (1 << 16) - 1)
        try:
            self.address_family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except socket.gaierror as error:
            raise ArgumentError("address", f"{host!r} has no address: {error.strerror}") from None
        self._accepted: list[Any] = []
        self._lock = threading.Lock()
        try:
            super().__init__(address, handler)  # type: ignore[arg-type]  # IPv6 addresses have four parts
        except OSError as error:
            raise ResourceError(f"cannot listen at port {port} of {host}: {error.strerror}") from None
        self.port = int(self.server_address[1])
        self._thread = Thread(self.serve_forever, name)
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self.end()

    def end(self) -> None:
        """Stops the server, and ends its connections."""
        self.shutdown()
        with self._lock:
            for request in self._accepted:
                _hang_up(request)
        self.server_close()
        self._thread.join()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection in a thread. If too many connections are open, ends the oldest connection."""
        with self._lock:
            self._accepted.append(request)
            if len(self._accepted) > self.MOST:
                _hang_up(self._accepted.pop(0))
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors of clients that have disconnected or were silent for too long, and reports other errors."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            if request in self._accepted:
                self._accepted.remove(request)
            super().shutdown_request(request)


def _hang_up(request: Any) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)  # the connection's thread reads the end of the stream, and closes the socket


def split_address(text: str, port: int, argument: str) -> tuple[str, int]:
    """Returns the host and the port of a text of the form HOST:PORT, HOST, :PORT, PORT, [IPv6] or [IPv6]:PORT. `port`
    is the default port. Raises ArgumentError, with the name `argument`, for any other text.
    """
    host, separator, number = text.rpartition(":")
    if not separator or text.endswith("]"):
        host, number = ("", text) if text.isdigit() else (text, str(port))
    if not number.isdecimal() or int(number) >= 1 << 16:
        raise ArgumentError(argument, f"expected HOST:PORT with a port below 65536, got {text!r}")
    return host.strip("[]") or "localhost", int(number)


class LocalPages(BaseHTTPRequestHandler):
    """Base class of HTTP servers' handlers. Requests, which are frequent and may contain a token, are not logged.

    Attributes:
        host: the name or the address that the server listens at.
        path_asked: the request's path.
        query: the request's parameters.
    """

    timeout = 10.0  # seconds that a client may take for its request, or to read an answer
    server_version = "ProxyCCL"
    sys_version = ""
    default_request_version = "HTTP/1.0"  # HTTP/0.9, the base class's default, has no status line
    host = "localhost"

    def parse_request(self) -> bool:
        """Parses and checks a request. Returns whether the base class should call the request's method."""
        if not super().parse_request():
            if not self.requestline.split():  # the base class answers other malformed requests
                self.send_error(400, "Bad request syntax")
            return False
        hosts = self.headers.get_all("Host", [])
        target, _, query = self.path.partition("?")
        if len(hosts) != 1 or not is_here(hosts[0], self.host):
            self.send_error(403, explain="the Host header does not name this machine")
        elif not target.startswith("/"):
            self.send_error(400, explain="expected a path that begins with a slash")
        else:
            self.path_asked, self.query = target, parse_qs(query)
            return True
        return False

    def finish(self) -> None:
        """Reads the rest of the request, because closing a connection with unread bytes would discard the answer."""
        super().finish()
        left, until = _LINGER_BYTES, time.monotonic() + _LINGER_SECONDS
        with contextlib.suppress(OSError):  # the client has disconnected
            self.connection.shutdown(socket.SHUT_WR)
            while left > 0 and (seconds := until - time.monotonic()) > 0:
                self.connection.settimeout(seconds)
                received = len(self.connection.recv(1 << 16))
                if received == 0:
                    return
                left -= received

    def log_message(self, format: str, *args: object) -> None:
        """Does nothing."""


def is_here(header: str, host: str) -> bool:
    """Whether a Host header names this machine: an address, localhost, the machine's name, or the served `host`."""
    text = header.strip().lower()
    name = text if text.endswith("]") else text.rpartition(":")[0] or text
    if name in {"localhost", host.lower(), platform.node().lower()}:
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
