"""A server of short connections from this machine: metrics, RAS clients and the page of `top --web`."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from socketserver import BaseRequestHandler, ThreadingTCPServer
from types import TracebackType
from typing import Any

from proxyccl.device.arguments.integers import as_integer
from proxyccl.device.errors import ArgumentError, ResourceError
from proxyccl.device.process.threads import Thread


class BoundedServer(ThreadingTCPServer):
    """Serves a bounded number of connections, each in a thread. One connection more ends the oldest, so silent clients
    do not block the server.

    Use it as a context manager, or call `end`.

    Args:
        host: name or address to listen at.
        port: the port; 0 for any free port.
        handler: the handler class of a connection.
        name: name of the server's thread.

    Raises:
        ArgumentError: the port is not from 0 to 65535, or the host has no address.
        ResourceError: the port is in use, or not permitted.
    """

    daemon_threads = True
    allow_reuse_address = True  # reuses addresses of ended connections, not of a listening server
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
            super().__init__(address, handler)  # type: ignore[arg-type]  # an IPv6 address has four parts
        except OSError as error:
            raise ResourceError(f"cannot listen at port {port} of {host}: {error.strerror}") from None
        self.port = int(self.server_address[1])
        self._thread = Thread(self.serve_forever, name)
        self._thread.start()

    def __enter__(self) -> BoundedServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        """Ends the oldest connection if there are too many."""
        with self._lock:
            self._accepted.append(request)
            if len(self._accepted) > self.MOST:
                _hang_up(self._accepted.pop(0))
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that have gone, or were silent for too long."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        with self._lock:
            if request in self._accepted:
                self._accepted.remove(request)
            super().shutdown_request(request)


def _hang_up(request: Any) -> None:
    with contextlib.suppress(OSError):  # the connection has just ended
        request.shutdown(socket.SHUT_RDWR)  # the connection's thread reads the end, and closes the socket


def split_address(text: str, port: int, argument: str) -> tuple[str, int]:
    """The host and the port of HOST:PORT, HOST, :PORT, PORT, [IPv6] or [IPv6]:PORT. `port` is that of an address
    without one. Raises ArgumentError for any other text, with the argument's name.
    """
    host, separator, number = text.rpartition(":")
    if not separator or text.endswith("]"):
        host, number = ("", text) if text.isdigit() else (text, str(port))
    if not number.isdecimal() or int(number) >= 1 << 16:
        raise ArgumentError(argument, f"expected HOST:PORT with a port below 65536, got {text!r}")
    return host.strip("[]") or "localhost", int(number)
