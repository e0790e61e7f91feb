"""Locks between processes."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Holds an exclusive lock on the file `path` during the `with` block, and makes the file if necessary. The
    kernel releases the lock of a process that ends.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
