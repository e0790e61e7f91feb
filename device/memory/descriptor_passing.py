"""Messages with file descriptors over Unix sockets. The functions of Python 3.11's `socket` leave out the flags."""

from __future__ import annotations

import array
import socket
from collections.abc import Sequence

_DESCRIPTOR_BYTES = array.array("i").itemsize


def send_with_descriptors(connection: socket.socket, data: bytes, descriptors: Sequence[int], flags: int = 0) -> None:
    """Sends a message. Raises OSError as `socket.sendmsg`."""
    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    connection.sendmsg([data], passed, flags)


def receive_with_descriptors(
    connection: socket.socket, longest: int, most: int, flags: int = 0
) -> tuple[bytes, list[int], int]:
    """The next message, its descriptors, and the flags with which it came. The caller closes the descriptors.

    Processes that this one starts do not inherit them.

    Args:
        connection: a socket.
        longest: most bytes of a message.
        most: most descriptors.
        flags: as for `socket.recvmsg`, which raises OSError.
    """
    room = socket.CMSG_LEN(most * _DESCRIPTOR_BYTES)
    data, ancillary, came, _ = connection.recvmsg(longest, room, flags | socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, part in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(part[: len(part) - len(part) % _DESCRIPTOR_BYTES])
    return data, list(descriptors), came
