"""Open descriptors: a limited resource, of a process and of the system."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator

from proxyccl.device.errors import ResourceError

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE})


def out_of_descriptors(what: str, number: int | None) -> ResourceError:
    """The error for a descriptor that could not be opened.

    Args:
        what: its purpose.
        number: the system's, ENFILE if the system's table of files is full.
    """
    if number == errno.ENFILE:
        return ResourceError(f"no descriptor is left for {what}: the system has as many open files as it allows")
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ResourceError(
        f"no descriptor is left for {what}: this process may have {limit} open (ulimit -n; it can be raised to {most})"
    )


@contextlib.contextmanager
def naming_exhaustion(what: str) -> Iterator[None]:
    """Around code that opens descriptors. Raises ResourceError, with their purpose, if there are too few."""
    try:
        yield
    except OSError as error:
        if error.errno not in EXHAUSTED:
            raise
        raise out_of_descriptors(what, error.errno) from None


def require_descriptors(count: int) -> None:
    """Raises OSError unless this process can open this many more. Another thread may take them later."""
    opened: list[int] = []
    try:
        opened.append(os.eventfd(0, os.EFD_CLOEXEC))
        while len(opened) < count:
            opened.append(os.dup(opened[0]))
    finally:
        for descriptor in opened:
            os.close(descriptor)
