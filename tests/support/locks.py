"""Locks between processes."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Holds a lock during the block: no other process is in a block with the same path at the same time. `path` is the
    lock file, which is made if necessary. If a process ends, however it ends, its lock is released.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
