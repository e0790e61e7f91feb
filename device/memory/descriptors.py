"""Passes file descriptors over Unix sockets, and raises errors if too few are left."""

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
        what: the descriptor's purpose, for the error's text.
        number: the errno. ENFILE means that the system's limit is reached, anything else the process's.
    """
    if number == errno.ENFILE:
        return ResourceError(f"no file descriptor is left for {what}: the system's limit on open files is reached")
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ResourceError(
        f"no file descriptor is left for {what}: this process may open {limit} (ulimit -n; it can be raised to {most})"
    )


@contextlib.contextmanager
def naming_exhaustion(what: str) -> Iterator[None]:
    """Returns a context that raises ResourceError, with the descriptors' purpose, if its code runs out of
    descriptors."""
    try:
        yield
    except OSError as error:
        if error.errno not in EXHAUSTED:
            raise
        raise out_of_descriptors(what, error.errno) from None


def require_descriptors(count: int) -> None:
    """Raises OSError unless this process can now open `count` more descriptors."""
    opened: list[int] = []
    try:
        opened.append(os.eventfd(0, os.EFD_CLOEXEC))
        while len(opened) < count:
            opened.append(os.dup(opened[0]))
    finally:
        for descriptor in opened:
            os.close(descriptor)


# This module does not use `socket.send_fds` and `recv_fds`, because they ignore the flags in Python 3.11.
def send_with_descriptors(connection: socket.socket, data: bytes, descriptors: Sequence[int], flags: int = 0) -> None:
    """Sends a message. Raises OSError as `socket.sendmsg` does."""
    passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    connection.sendmsg([data], passed, flags)


def receive_with_descriptors(
    connection: socket.socket, longest: int, most: int, flags: int = 0
) -> tuple[bytes, list[int], int]:
    """Receives a message. Returns the message's bytes, descriptors and flags. The caller closes the descriptors.

    The descriptors have the flag FD_CLOEXEC.

    Args:
        connection: a socket.
        longest: maximum number of bytes of a message.
        most: maximum number of descriptors.
        flags: the flags of `socket.recvmsg`, whose OSError is passed on.
    """
    room = socket.CMSG_LEN(most * _DESCRIPTOR_BYTES)
    data, ancillary, came, _ = connection.recvmsg(longest, room, flags | socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, part in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(part[: len(part) - len(part) % _DESCRIPTOR_BYTES])
    return data, list(descriptors), came
