"""Opens a connection to a node daemon: exchanges hellos, with which the client and the daemon may refuse each other,
and makes requests until a `DaemonConnection` takes over the connection.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from proxyccl.device.errors import ProtocolError, ProxyCCLError, RuntimeUnavailableError
from proxyccl.device.memory.descriptors import naming_exhaustion
from proxyccl.device.memory.sockets import peer_credentials
from proxyccl.device.process import forks
from proxyccl.proxy.daemon.listeners import shown
from proxyccl.proxy.daemon.protocol import (
    DAEMON,
    HELLO_ANSWERS,
    HELLOS,
    LAYOUT,
    METHODS,
    REPLIES,
    VERSION,
    Answer,
    Hello,
    HelloAnswer,
    Refused,
    close_all,
    limit_waits,
    receive,
    send,
)
from proxyccl.proxy.daemon.session import REQUESTS

P = ParamSpec("P")
R = TypeVar("R")


class DaemonAddress:
    """The address of a daemon; `str` makes it readable."""

    def connect(self, timeout: float) -> tuple[socket.socket, int]:
        """Connects to the daemon, with at most `timeout` seconds for each step. Returns the connection, and the
        daemon's process id, which is 0 if the daemon has no id in this PID namespace.

        Raises:
            RuntimeUnavailableError: no such daemon is running; the message says how to start one.
            ResourceError: there are too few descriptors.
        """
        raise NotImplementedError

    def last_words(self) -> str:
        """Returns the last output of the daemon, for `ProxyLostError`, or "" if this process can't read the output."""
        return ""

    def close(self) -> None:
        """Frees the resources of the address, such as descriptors."""


def introduce(address: str, timeout: float) -> tuple[socket.socket, HelloAnswer]:
    """Connects to a daemon and exchanges hellos. Returns the connection, and the daemon's hello.

    Raises:
        RuntimeUnavailableError: the daemon does not accept this process.
        ResourceError: there are too few descriptors.
        OSError, ProtocolError: no daemon is running, or the daemon does not answer.
    """
    with naming_exhaustion("a connection to the node daemon"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    forks.keep_from_children(connection)
    try:
        limit_waits(connection, timeout, timeout)
        connection.connect(address)
        _, user = peer_credentials(connection)
        if user not in (0, os.geteuid()):
            raise _refused(address, f"it belongs to user {user}")
        answer = _say_hello(connection)
        if answer.error:
            raise _refused(address, answer.message)
        if answer.version != VERSION:
            raise _refused(address, f"it speaks version {answer.version} of the protocol, this process {VERSION}")
        limit_waits(connection, timeout, 0)
    except (OSError, ProxyCCLError):
        connection.close()
        raise
    return connection, answer


def _refused(address: str, reason: str) -> RuntimeUnavailableError:
    return RuntimeUnavailableError(f"the node daemon at {shown(address)} does not accept this process: {reason}")


def _say_hello(connection: socket.socket) -> HelloAnswer:
    with contextlib.suppress(BrokenPipeError):  # the daemon has already refused this user
        send(connection, HELLOS, Hello(VERSION, LAYOUT))
    message = receive(connection, HELLO_ANSWERS, DAEMON)
    if message is None:
        raise ConnectionResetError("it hung up")
    return message[0]


def ask_first(
    connection: socket.socket, function: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
) -> R:
    """Calls a method of the daemon over a connection that no thread reads yet. Returns the method's result. Raises
    the daemon's ProxyCCLError, and OSError or ProtocolError if the daemon does not answer, or sends no valid answer.
    """
    method = METHODS[function.__name__]
    request, sent = method.request_of(args, kwargs)
    send(connection, REQUESTS, request, sent)
    message = receive(connection, REPLIES, DAEMON)
    if message is None:
        raise ConnectionResetError("it hung up")
    reply, descriptors = message
    if isinstance(reply, Answer) and len(descriptors) == method.returns_descriptors:
        return cast(R, descriptors or method.result.decode(reply.result, DAEMON))
    close_all(descriptors)
    if isinstance(reply, Refused):
        raise reply.exception()
    raise ProtocolError(f"it answered with {reply!r:.100}")
