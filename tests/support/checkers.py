"""The checkers of tests/models, which are fetched when the first test asks for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from support.debian_packages import UnavailableError
from support.fetch_checkers import fetch
from support.paths import ROOT

DIRECTORY = ROOT / "build/checkers"


def checkers() -> Path:
    """The directory that Debian's packages are unpacked in.

    Where they are not available the test is skipped, unless PROXYCCL_REQUIRE_MODELS is 1.
    """
    try:
        fetch(DIRECTORY)
    except UnavailableError as error:
        if os.environ.get("PROXYCCL_REQUIRE_MODELS") == "1":
            pytest.fail(f"the checkers are not available: {error}")
        pytest.skip(f"the checkers are not available: {error}")
    return DIRECTORY
