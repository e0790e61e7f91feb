"""Requests to this machine's own HTTP servers: the page of `top --web`, and metrics.

Every request is checked in one place, whatever its method and path. The Host header must name this machine, so that a
page in a browser can't use a foreign name that resolves to the loopback address (DNS rebinding). A malformed request
gets an answer too.
"""

from __future__ import annotations

import contextlib
import ipaddress
import platform
import socket
import time
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs

_LINGER_SECONDS = 1.0
_LINGER_BYTES = 1 << 20


class LocalPages(BaseHTTPRequestHandler):
    """Base class of the servers' handlers. Requests are not logged: they are frequent, and a path may contain a token.

    Attributes:
        host: the name or the address that the server listens at.
        path_asked: the request's path.
        query: the request's parameters.
    """

    timeout = 10.0  # seconds that a client may take for its request, or to read an answer
    server_version = "ProxyCCL"
    sys_version = ""
    default_request_version = "HTTP/1.0"  # so that the answer to a malformed request has a status line
    host = "localhost"

    def parse_request(self) -> bool:
        """Parses and checks a request. Returns False if the request was refused, else its method's function answers."""
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
        with contextlib.suppress(OSError):  # the client has gone
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
    """Whether a Host header names this machine: by an address, as localhost, or as the machine or the user (`host`)
    calls it.
    """
    text = header.strip().lower()
    name = text if text.endswith("]") else text.rpartition(":")[0] or text
    if name in {"localhost", host.lower(), platform.node().lower()}:
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
