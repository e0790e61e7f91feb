"""Runs the tests of a module in each of the worlds that the module names in `WORLDS`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.devices import runtime_with_blocks
from support.ranks import Ranks


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrizes tests with the module's worlds. A world is a number of ranks, and options of their communicators."""
    if "ranks" in metafunc.fixturenames and hasattr(
        metafunc.module, "WORLDS"
    ):  # modules without WORLDS define their own fixture `ranks`
        metafunc.parametrize("ranks", metafunc.module.WORLDS, indirect=True, ids=str, scope="module")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    size, options = request.param
    with Ranks(size, make_runtime=runtime_with_blocks, **options) as made:
        yield made
