"""Lets the daemon connect processes that can't reach each other: each gets one of a pair of connected sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from proxyccl.device.errors import ArgumentError
from proxyccl.device.memory import sockets
from proxyccl.device.memory.descriptor_server import serve
from proxyccl.device.process import forks
from proxyccl.device.process.threads import Thread

Hand = Callable[[socket.socket], None]
"""A function that sends a process, without waiting, one end of a connection, which the caller closes. Raises OSError.
"""


class Introductions:
    """The processes to which the daemon, called `name` in errors, can connect others and itself. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = f"the node daemon at {name}"
        self._lock = threading.Lock()
        self._hands: dict[bytes, Hand] = {forks.here().token: _answer_here}
        sockets.add_broker(self._name, self._connect)

    def offer(self, process: bytes, hand: Hand, confirm: Callable[[], object]) -> None:
        """Lets other processes connect to the process with this token. First calls `confirm`, which must send the
        answer to the process's request, so that the process gets this answer before the first connection. `confirm`
        must not wait, because all introductions would wait for `confirm`.
        """
        with self._lock:
            confirm()
            self._hands[process] = hand

    def withdraw(self, process: bytes, hand: Hand) -> None:
        """Undoes `offer`, unless the process has made a later offer."""
        with self._lock:
            if self._hands.get(process) == hand:
                del self._hands[process]

    def reach(self, process: bytes) -> socket.socket:
        """Connects to a process's server of descriptors. Returns the connection. Raises ArgumentError if the process
        has made no offer, or does not accept the connection, and OSError if there are too few descriptors.
        """
        with self._lock:
            hand = self._hands.get(process)
        if hand is None:
            raise ArgumentError("process", "the node daemon does not know the process, which may have ended")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                hand(theirs)
        except OSError as error:
            ours.close()
            raise ArgumentError("process", f"the node daemon can't hand over a connection to it: {error}") from None
        return ours

    def _connect(self, process: bytes, timeout: float) -> socket.socket:
        try:
            connection = self.reach(process)
        except ArgumentError as error:
            raise sockets.UnreachableError(str(error)) from None
        connection.settimeout(timeout)
        return connection

    def close(self) -> None:
        """Stops this process from reaching other processes through the daemon."""
        sockets.remove_broker(self._name)


def _answer_here(theirs: socket.socket) -> None:
    copy = theirs.dup()
    with contextlib.ExitStack() as undo:
        undo.callback(copy.close)
        Thread(serve().answer, "proxyccl-introduced", copy).start()
        undo.pop_all()
