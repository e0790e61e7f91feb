"""Makes files once for all pytest-xdist workers of a test run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from support.locks import one_at_a_time
from support.paths import ROOT


def shared_directory(factory: pytest.TempPathFactory) -> Path:
    """Returns the temporary directory that all workers of a test run share."""
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def made_once(directory: Path, make: Callable[[Path], None]) -> Path:
    """Returns `directory`. The first process that calls this function makes the directory and lets `make` fill it;
    other processes wait until the directory is filled.
    """
    done = directory / "made"
    with one_at_a_time(directory.with_name(f"{directory.name}.lock")):
        if not done.exists():
            directory.mkdir()
            make(directory)
            done.touch()
    return directory


def run_make(target: str) -> None:
    """Brings a target up to date with make."""
    with one_at_a_time(ROOT / "build/make.lock"):
        subprocess.run(["make", "--silent", target], cwd=ROOT, check=True, timeout=300)
