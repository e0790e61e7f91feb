"""What is made once for all processes of a test run: pytest-xdist's workers are several."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.paths import ROOT


@contextlib.contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Within the block no other process is in a block with this path, a file that is made if it is not there.

    A process that ends, however it ends, lets the next one in.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def shared_directory(factory: pytest.TempPathFactory) -> Path:
    """The temporary directory of the whole test run, which its workers share."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def made_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """The directory, which the first process that asks for it makes: `make` fills it while the others wait."""
    done = directory / "made"
    with one_at_a_time(directory.with_name(f"{directory.name}.lock")):
        if not done.exists():
            directory.mkdir()
            make(directory)
            done.touch()
    return directory


def run_make(target: str) -> None:
    """Has make bring a target up to date."""
    with one_at_a_time(ROOT / "build/make.lock"):
        subprocess.run(["make", "--silent", target], cwd=ROOT, check=True, timeout=300)
