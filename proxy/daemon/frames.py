"""Frames over a Unix socket of sequenced packets: one message each, with file descriptors if it needs any."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from typing import TypeVar

from proxyccl.device.errors import ProtocolError
from proxyccl.device.memory.descriptors import receive_with_descriptors, send_with_descriptors
from proxyccl.proxy.codec import Codec
from proxyccl.proxy.daemon.protocol import LONGEST_FRAME, MOST_DESCRIPTORS

T = TypeVar("T")


def send(
    connection: socket.socket, codec: Codec[T], message: T, descriptors: Sequence[int] = (), flags: int = 0
) -> None:
    """Sends a frame.

    Raises:
        ProtocolError: the message is too long for one.
        OSError: as the socket does.
    """
    send_with_descriptors(connection, codec.encode(message), descriptors, flags)


def receive(connection: socket.socket, codec: Codec[T], source: str, flags: int = 0) -> tuple[T, list[int]] | None:
    """The next frame's message and descriptors, which the caller closes; None when the sender has hung up.

    Raises:
        ProtocolError: `source` sent something else.
        OSError: as the socket does.
    """
    frame, descriptors, came = receive_with_descriptors(connection, LONGEST_FRAME, MOST_DESCRIPTORS, flags)
    try:
        if not frame and not descriptors:
            return None
        _require_whole(came, source)
        return codec.decode(frame, source), descriptors
    except ProtocolError:
        close_all(descriptors)
        raise


def _require_whole(flags: int, source: str) -> None:
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise ProtocolError(
            f"a frame from {source} did not arrive whole: it has more than {LONGEST_FRAME} bytes, more than "
            f"{MOST_DESCRIPTORS} descriptors, or more than this process may still open (ulimit -n)"
        )


def close_all(descriptors: list[int]) -> None:
    """Closes descriptors and empties the list."""
    while descriptors:
        os.close(descriptors.pop())


def limit_waits(connection: socket.socket, send_seconds: float, receive_seconds: float) -> None:
    """Bounds the socket's waits; 0 for no bound.

    These are the system's time-outs and not Python's, with which a non-blocking send would still wait.
    """
    for option, seconds in ((socket.SO_SNDTIMEO, send_seconds), (socket.SO_RCVTIMEO, receive_seconds)):
        parts = divmod(int(seconds * 1e6), 1_000_000)
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", *parts))
