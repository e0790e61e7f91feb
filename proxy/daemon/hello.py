"""The first step of each connection to a node daemon: hellos, by which either end may refuse the other."""

from __future__ import annotations

import contextlib
import os
import socket

from proxyccl.device.errors import ProxyCCLError, RuntimeUnavailableError
from proxyccl.device.memory.descriptors import naming_exhaustion
from proxyccl.device.memory.sockets import peer_credentials
from proxyccl.device.process import forks
from proxyccl.proxy.daemon.frames import limit_waits, receive, send
from proxyccl.proxy.daemon.listeners import shown
from proxyccl.proxy.daemon.protocol import HELLO_ANSWERS, HELLOS, LAYOUT, VERSION, Hello, HelloAnswer

_DAEMON = "the node daemon"


def introduce(address: str, timeout: float) -> tuple[socket.socket, HelloAnswer]:
    """Connects to a daemon and says hello. Returns the connection, and the answer.

    Raises:
        RuntimeUnavailableError: the daemon does not accept this process.
        ResourceError: there are too few descriptors.
        OSError, ProtocolError: there is no daemon, or it does not answer.
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
    """The daemon's answer. Raises ConnectionResetError if it hung up."""
    with contextlib.suppress(BrokenPipeError):  # it may have refused this user already, and said so
        send(connection, HELLOS, Hello(VERSION, LAYOUT))
    message = receive(connection, HELLO_ANSWERS, _DAEMON)
    if message is None:
        raise ConnectionResetError("it hung up")
    return message[0]
