"""Fetches SPIN and Relacy's headers, the checkers of tests/models, from Debian."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from support.packages.debian import Apt, UnavailableError, fill_once, machine_suite, require_x86_64, unpack
from support.paths import ROOT

DIRECTORY = ROOT / "build/checkers"
PACKAGES = ("relacy-dev", "spin")


def checkers() -> Path:
    """Fetches the checkers if they are missing. Returns the directory with the unpacked Debian packages.

    If the checkers are not available, skips the test, or fails it if PROXYCCL_REQUIRE_MODELS is 1.
    """
    try:
        fill_once(DIRECTORY, " ".join(PACKAGES), _fill)
    except UnavailableError as error:
        if os.environ.get("PROXYCCL_REQUIRE_MODELS") == "1":
            pytest.fail(f"the checkers are not available: {error}")
        pytest.skip(f"the checkers are not available: {error}")
    return DIRECTORY


def _fill(directory: Path) -> None:
    require_x86_64("SPIN")
    with tempfile.TemporaryDirectory(dir=directory) as downloads:
        apt = Apt(Path(downloads, "apt"), machine_suite())
        unpack([apt.download(package) for package in PACKAGES], directory)
