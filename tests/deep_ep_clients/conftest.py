"""The ranks of a module's tests: each of the worlds that it names in `WORLDS`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.devices import runtime_with_blocks
from support.ranks import Ranks


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A world is the number of its ranks, and the options of their communicators."""
    if "ranks" in metafunc.fixturenames and hasattr(metafunc.module, "WORLDS"):  # others have a fixture of their own
        metafunc.parametrize("ranks", metafunc.module.WORLDS, indirect=True, ids=str, scope="module")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """The ranks of one world."""
    size, options = request.param
    with Ranks(size, make_runtime=runtime_with_blocks, **options) as made:
        yield made
