"""File descriptors: errors for their limits, and passing them over Unix sockets."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import resource
import socket
from collections.abc import Iterator, Sequence

from proxyccl.device.errors import ResourceError

_DESCRIPTOR_BYTES = array.array("i").itemsize
EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE})


def out_of_descriptors(what: str, number: int | None) -> ResourceError:
    """Returns the error for a descriptor that could not be opened.

    Args:
        what: the descriptor's purpose.
        number: the errno; ENFILE if the system's table of files is full.
    """
    if number == errno.ENFILE:
        return ResourceError(f"no file descriptor is left for {what}: the system's limit on open files is reached")
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ResourceError(
        f"no file descriptor is left for {what}: this process may open {limit} (ulimit -n; it can be raised to {most})"
    )


@contextlib.contextmanager
def naming_exhaustion(what: str) -> Iterator[None]:
    """Returns a context for code that opens descriptors: it raises ResourceError, which names their purpose, if there
    are too few."""
    try:
        yield
    except OSError as error:
        if error.errno not in EXHAUSTED:
            raise
        raise out_of_descriptors(what, error.errno) from None


def require_descriptors(count: int) -> None:
    """Raises OSError unless this process can open this many more. Another thread may open descriptors after this
    check."""
    opened: list[int] = []
    try:
        opened.append(os.eventfd(0, os.EFD_CLOEXEC))
        while len(opened) < count:
            opened.append(os.dup(opened[0]))
    finally:
        for descriptor in opened:
            os.close(descriptor)


# The functions of Python 3.11's `socket` that pass descriptors leave out the flags.
def send_with_descriptors(connection: socket.socket, data: bytes, descriptors: Sequence[int], flags: int = 0) -> None:
    """Sends a message. Raises OSError as `socket.sendmsg` does."""
    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    connection.sendmsg([data], passed, flags)


def receive_with_descriptors(
    connection: socket.socket, longest: int, most: int, flags: int = 0
) -> tuple[bytes, list[int], int]:
    """Receives a message. Returns the message's bytes, its descriptors, which the caller must close, and its flags.

    Child processes do not inherit the descriptors.

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
