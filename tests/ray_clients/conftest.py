"""Ray's base classes: those of a stand-in, whether Ray is installed or not."""

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
    """Its folder, from which `ray` is imported meanwhile."""
    _forget()
    sys.path.insert(0, str(STAND_IN))
    yield STAND_IN
    sys.path.remove(str(STAND_IN))
    _forget()
