"""How a process that shares no other socket with others is introduced to them by the node daemon (introductions.py)."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

from proxyccl.device.errors import ProtocolError, ProxyLostError, RuntimeUnavailableError
from proxyccl.device.memory import sockets
from proxyccl.device.memory.descriptor_server import serve
from proxyccl.device.process import forks
from proxyccl.device.process.threads import Thread
from proxyccl.proxy.daemon.frames import close_all, limit_waits, receive, send
from proxyccl.proxy.daemon.hello import introduce
from proxyccl.proxy.daemon.protocol import (
    REPLIES,
    REQUESTS,
    AnyReply,
    AnyRequest,
    Done,
    Introduced,
    Offer,
    Reach,
    Reached,
    Refused,
)

_DAEMON = "the node daemon"
_lock = threading.Lock()
forks.hold_while_forking(_lock)
_offered: dict[Path, forks.Process] = {}


def offer(path: Path, timeout: float) -> None:
    """Lets the daemon at a path introduce others to this process, and this one to others, from now on.

    Args:
        path: of the daemon's socket.
        timeout: seconds for each step.

    Raises:
        RuntimeUnavailableError: there is no such daemon, or it does not accept this process.
        ResourceError: there are too few descriptors or threads.
    """
    with _lock:
        process = _offered.get(path)
        if process is not None and process.is_here:
            return
        server = serve()
        connection = _connect(path, timeout)
        try:
            _exchange(connection, Offer(forks.here().token.hex()), Done, path)
            limit_waits(connection, timeout, 0)
            Thread(_answer_all, "proxyccl-introduced", connection, server.answer, path).start()
        except BaseException:
            connection.close()
            raise
        _offered[path] = forks.here()
        reach_through(path)


def reach_through(path: Path) -> None:
    """Reaches processes that no other socket leads to through the daemon at a path, if there is one, from now on."""
    sockets.add_broker(f"{_DAEMON} at {path}", lambda token, seconds: _reach(path, token, seconds))


def is_offered(path: Path) -> bool:
    """Whether the daemon at a path introduces others to this process."""
    with _lock:
        process = _offered.get(path)
    return process is not None and process.is_here


def _connect(path: Path, timeout: float) -> socket.socket:
    try:
        return introduce(os.fspath(path), timeout)[0]
    except (OSError, ProtocolError) as error:
        raise RuntimeUnavailableError(f"no node daemon answers at {path} ({error})") from None


def _exchange(connection: socket.socket, request: AnyRequest, expected: type[AnyReply], path: Path) -> list[int]:
    """The descriptors of the daemon's answer."""
    try:
        send(connection, REQUESTS, request)
        message = receive(connection, REPLIES, _DAEMON)
    except (OSError, ProtocolError) as error:
        raise RuntimeUnavailableError(f"{_DAEMON} at {path} does not introduce this process: {error}") from None
    reply, descriptors = message or (None, [])
    if isinstance(reply, expected):
        return descriptors
    close_all(descriptors)
    reason = reply.message if isinstance(reply, Refused) else f"it answered with {reply!r:.100}"
    raise RuntimeUnavailableError(f"{_DAEMON} at {path} does not introduce this process: {reason}")


def _answer_all(connection: socket.socket, answer: object, path: Path) -> None:
    assert callable(answer)
    try:
        with connection:
            while (message := receive(connection, REPLIES, _DAEMON)) is not None:
                reply, descriptors = message
                if not isinstance(reply, Introduced) or len(descriptors) != 1:
                    close_all(descriptors)
                    continue
                Thread(answer, "proxyccl-introduced", socket.socket(fileno=descriptors[0])).start()
    except (OSError, ProtocolError):  # whoever needs the daemon finds that it has ended
        pass
    finally:
        with _lock:
            _offered.pop(path, None)


def _reach(path: Path, token: bytes, timeout: float) -> socket.socket:
    try:
        with _connect(path, timeout) as connection:
            limit_waits(connection, timeout, timeout)
            descriptors = _exchange(connection, Reach(token.hex()), Reached, path)
    except (RuntimeUnavailableError, ProxyLostError) as error:
        raise sockets.UnreachableError(str(error)) from None
    reached = socket.socket(fileno=descriptors.pop(0))
    close_all(descriptors)
    reached.settimeout(timeout)
    return reached
