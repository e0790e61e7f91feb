"""The node daemon's `--ras`: answers clients of NCCL's RAS subsystem, such as `ncclras`, Ray Train and SGLang.

The protocol is text over TCP, with one command per line; the server listens at localhost:28028, or at the address in
NCCL_RAS_ADDR. The protocol follows the code of NCCL 2.30, src/ras/client_support.cc (rasClientEventLoop) and
src/ras/client.cc; NCCL's user guide documents the protocol under "RAS".

    CLIENT PROTOCOL 2   -> SERVER PROTOCOL 2
    TIMEOUT seconds     -> OK
    SET FORMAT text     -> OK       or json
    STATUS              -> the status; then the server closes the connection
    VERBOSE STATUS      -> the same, with more ranks named

Any other line is answered with a line that begins with "ERROR: ". Commands are not case-sensitive, and a carriage
return before the newline is ignored. TIMEOUT has no effect: in NCCL it limits the wait for other processes, but this
server waits for no other process.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from socketserver import StreamRequestHandler

from proxyccl.device.errors import ArgumentError
from proxyccl.device.shown_text import shown
from proxyccl.proxy.observe.bounded_server import BoundedServer, split_address
from proxyccl.tools import ras_status
from proxyccl.tools.communicators import communicators

PORT = 28028
PROTOCOL = 2
_MOST_LINE = 1024  # the largest number of bytes of a command's line
_HTTP = re.compile(r" HTTP/[0-9.]+$")  # a web page may make a browser send commands in a request's body
_SILENCE = 60.0  # seconds after which the server disconnects a silent client


@contextlib.contextmanager
def serve(address: str) -> Iterator[str]:
    """A context manager that runs a server, and whose value is a text with the server's address. `address` is
    HOST:PORT, HOST or :PORT; "" means the address in ``NCCL_RAS_ADDR``, or localhost:28028 if that variable is not set.
    Raises ArgumentError if `address` is not an address, and ResourceError if the port is not allowed, or in use, for
    example by an NCCL job.
    """
    argument = "--ras" if address else "NCCL_RAS_ADDR"
    host, port = split_address(address or os.environ.get("NCCL_RAS_ADDR", ""), PORT, argument)
    with BoundedServer(host, port, _Client, "proxyccl-ras") as server:
        yield f"clients of NCCL RAS are answered at {host}:{server.port}"


class _Client(StreamRequestHandler):
    timeout = _SILENCE

    def setup(self) -> None:
        super().setup()
        self._as_json = False

    def handle(self) -> None:
        while line := self.rfile.readline(_MOST_LINE + 1):
            if len(line) > _MOST_LINE:  # closes the connection, as NCCL's server does
                return
            command = line.decode(errors="replace").removesuffix("\n").removesuffix("\r")
            if _HTTP.search(command):
                self._say("ERROR: expected a client of NCCL RAS, not of HTTP\n")
                return
            match command.lower():
                case "status" | "verbose status" as asked:
                    self._say(self._status(verbose=asked.startswith("verbose")))
                    return
                case _:
                    self._say(shown(self._reply(command)) + "\n")

    def _reply(self, command: str) -> str:
        words = command.lower()
        if words.startswith("client protocol "):
            return f"SERVER PROTOCOL {PROTOCOL}"
        if words.startswith("timeout "):
            seconds = command[len("timeout ") :]
            return "OK" if seconds.strip().isdecimal() else f"ERROR: Invalid timeout value {seconds}"
        if words.startswith("set format "):
            name = words[len("set format ") :]
            if name not in ("text", "json"):
                return f"ERROR: Invalid format {command[len('set format ') :]}"
            self._as_json = name == "json"
            return "OK"
        if words.split(" ")[0] == "monitor":
            return "ERROR: MONITOR is not supported; ask for STATUS"
        return f"ERROR: Unknown command {command}"

    def _status(self, *, verbose: bool) -> str:
        began = time.monotonic()
        try:
            found = communicators()
        except ArgumentError as error:
            return shown(f"ERROR: {error}") + "\n"
        seconds = time.monotonic() - began
        if self._as_json:
            return ras_status.as_json(found, seconds)
        return ras_status.as_text(found, seconds, verbose=verbose)

    def _say(self, text: str) -> None:
        self.wfile.write(text.encode())
