"""Greets all callers of a socket at once: a silent or slow one does not hold up the others."""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time

from msgspec import Struct

GREETING_SECONDS = 2.0
"""Seconds that a connection may take to identify itself. Ranks do so at once."""
MOST_GREETED = 256
"""Connections that are greeted at once; one more replaces the one that has been silent for longest."""
_MOST_ACCEPTED = 64  # in one turn, so that a flood does not keep the clock from being read
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_GONE = (errno.ECONNABORTED, errno.EPROTO)


class _Stranger(Struct):
    connection: socket.socket
    deadline: float
    received: bytes = b""


class Greetings:
    """Accepts connections, and returns those that have sent their hello.

    Args:
        listener: the listening socket, which it makes non-blocking. The caller closes it.
        nbytes: of a hello.
    """

    def __init__(self, listener: socket.socket, nbytes: int) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._nbytes = nbytes
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest comes first

    def wait(self, seconds: float) -> list[tuple[socket.socket, bytes]]:
        """The (non-blocking) connections that have sent a complete hello, and the hello. The caller closes them.

        Args:
            seconds: to wait for anything to happen.

        Raises:
            OSError: no descriptor is left for a connection, and none is held by one that is being greeted.
        """
        greeted = []
        for key, _ in self._selector.select(seconds):
            if key.fileobj is self._listener:
                self._accept()
            elif (stranger := self._strangers.get(key.data)) is not None and self._hear(stranger):
                greeted.append((stranger.connection, stranger.received))
        now = time.monotonic()
        for late in [each for each in self._strangers.values() if each.deadline < now]:
            self._drop(late)
        return greeted

    def close(self) -> None:
        """Closes the connections that have not sent their hello."""
        for stranger in list(self._strangers.values()):
            self._drop(stranger)
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(_MOST_ACCEPTED):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _GONE:
                    continue
                if error.errno not in _NO_ROOM or not self._strangers:
                    raise
                self._drop_oldest()
                continue
            if len(self._strangers) == MOST_GREETED:
                self._drop_oldest()
            connection.setblocking(False)
            self._strangers[connection] = _Stranger(connection, time.monotonic() + GREETING_SECONDS)
            self._selector.register(connection, selectors.EVENT_READ, connection)

    def _hear(self, stranger: _Stranger) -> bool:
        """Reads on. Returns whether the hello is whole; the connection is then the caller's."""
        try:
            data = stranger.connection.recv(self._nbytes - len(stranger.received))
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        stranger.received += data
        if not data:
            self._drop(stranger)
        elif len(stranger.received) == self._nbytes:
            self._forget(stranger)
            return True
        return False

    def _drop_oldest(self) -> None:
        self._drop(next(iter(self._strangers.values())))

    def _drop(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        with contextlib.suppress(OSError):
            stranger.connection.close()

    def _forget(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.connection)
        del self._strangers[stranger.connection]
