"""A lock that lets one process at a time build a file, because ranks that start together need the same kernels."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_LONGEST_WAIT = 600.0  # seconds
_PAUSE = 0.01  # seconds between two attempts to lock


@contextlib.contextmanager
def one_builder(directory: int, path: Path) -> Iterator[bool]:
    """Returns a context that holds the lock of a file. Waits at most 10 minutes for another process's lock.

    The operating system releases the lock if the process is killed. Raises OSError if the directory can't be written.

    Args:
        directory: a descriptor of the file's directory, in which the lock file is created.
        path: the file's path; only its name matters.

    Yields:
        Whether this process has waited, in which case another process has probably built the file.
    """
    name = f".{path.name}.lock"
    descriptor, waited = _lock(directory, name)
    try:
        yield waited
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing does not unlock while a fork's child has the descriptor
        os.close(descriptor)


def _lock(directory: int, name: str) -> tuple[int, bool]:
    """Returns a descriptor of the lock file, and whether locking took more than one attempt."""
    ends = time.monotonic() + _LONGEST_WAIT
    waited = False
    while True:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(descriptor, directory, name):
                return descriptor, waited
        except BlockingIOError:
            pass
        except OSError:  # the file system has no locks, so each process builds the file
            return descriptor, waited
        if time.monotonic() > ends:
            return descriptor, waited
        os.close(descriptor)
        waited = True
        time.sleep(_PAUSE)


def _is_named(descriptor: int, directory: int, name: str) -> bool:
    try:
        return os.path.samestat(os.stat(name, dir_fd=directory, follow_symlinks=False), os.fstat(descriptor))
    except FileNotFoundError:
        return False
