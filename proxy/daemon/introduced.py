"""Connects processes that can reach each other only through the node daemon; introductions.py is the daemon's part."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from proxyccl.device.errors import ProtocolError, ProxyCCLError, RuntimeUnavailableError
from proxyccl.device.memory import sockets
from proxyccl.device.memory.descriptor_server import serve
from proxyccl.device.process import forks
from proxyccl.device.process.threads import Thread
from proxyccl.proxy.daemon.hello import ask_first, introduce
from proxyccl.proxy.daemon.protocol import DAEMON, REPLIES, Introduced, close_all, limit_waits, receive
from proxyccl.proxy.daemon.session import Session

R = TypeVar("R")

_lock = threading.Lock()
forks.hold_while_forking(_lock)
_offered: dict[Path, forks.Process] = {}


def offer(path: Path, timeout: float) -> None:
    """Offers this process to the daemon at a path. Afterwards the daemon connects other processes to this process, and
    this process to other processes. Raises RuntimeUnavailableError if no such daemon is running, or the daemon does not
    accept this process, and ResourceError if there are too few descriptors or threads.
    """
    with _lock:
        process = _offered.get(path)
        if process is not None and process.is_here:
            return
        server = serve()
        connection = _connect(path, timeout)
        try:
            _ask(path, connection, Session.offer, forks.here().token)
            limit_waits(connection, timeout, 0)
            Thread(_answer_all, "proxyccl-introduced", connection, server.answer, path).start()
        except BaseException:
            connection.close()
            raise
        _offered[path] = forks.here()
        reach_through(path)


def reach_through(path: Path) -> None:
    """If a daemon listens at a path, connects this process through it to processes that are not reachable directly."""
    sockets.add_broker(f"{DAEMON} at {path}", lambda token, seconds: _reach(path, token, seconds))


def is_offered(path: Path) -> bool:
    """Whether the daemon at a path connects other processes to this process."""
    with _lock:
        process = _offered.get(path)
    return process is not None and process.is_here


def _connect(path: Path, timeout: float) -> socket.socket:
    try:
        return introduce(os.fspath(path), timeout)[0]
    except (OSError, ProtocolError) as error:
        raise RuntimeUnavailableError(f"no node daemon answers at {path} ({error})") from None


def _ask(path: Path, connection: socket.socket, function: Callable[[Any, str], R], token: bytes) -> R:
    try:
        return ask_first(connection, function, token.hex())
    except (OSError, ProxyCCLError) as error:
        reason = str(error).removeprefix("process: ")  # an ArgumentError's text begins with its argument
        raise RuntimeUnavailableError(f"{DAEMON} at {path} does not introduce this process: {reason}") from None


def _answer_all(connection: socket.socket, answer: object, path: Path) -> None:
    assert callable(answer)
    try:
        with connection:
            while (message := receive(connection, REPLIES, DAEMON)) is not None:
                reply, descriptors = message
                if not isinstance(reply, Introduced) or len(descriptors) != 1:
                    close_all(descriptors)
                    continue
                Thread(answer, "proxyccl-introduced", socket.socket(fileno=descriptors[0])).start()
    except (OSError, ProtocolError):  # if the daemon has ended, the next request raises an error
        pass
    finally:
        with _lock:
            _offered.pop(path, None)


def _reach(path: Path, token: bytes, timeout: float) -> socket.socket:
    try:
        with _connect(path, timeout) as connection:
            limit_waits(connection, timeout, timeout)
            (descriptor,) = _ask(path, connection, Session.reach, token)
    except RuntimeUnavailableError as error:
        raise sockets.UnreachableError(str(error)) from None
    reached = socket.socket(fileno=descriptor)
    reached.settimeout(timeout)
    return reached
