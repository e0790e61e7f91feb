"""Replaces Ray's base classes by a stand-in, even if Ray is installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import TESTS

STAND_IN = TESTS / "support" / "fakes" / "ray_package"


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "ray" or name.startswith("proxyccl.ray")]:
        del sys.modules[name]


@pytest.fixture(autouse=True, scope="package")
def stand_in() -> Iterator[Path]:
    """Lets `ray` be imported from the stand-in's folder during the tests. Yields the folder."""
    _forget()
    sys.path.insert(0, str(STAND_IN))
    yield STAND_IN
    sys.path.remove(str(STAND_IN))
    _forget()
