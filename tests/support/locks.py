"""Locks between processes."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Within the block no other process is in a block with this path, a file that is made if necessary.

    A process that ends, however it ends, lets the next one in.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
