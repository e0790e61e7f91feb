"""Runs a module's tests once for each entry of its `WORLDS`: a number of ranks, and their communicators' options."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.devices import runtime_with_blocks
from support.ranks import Ranks


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ranks" in metafunc.fixturenames and hasattr(
        metafunc.module, "WORLDS"
    ):  # modules without WORLDS define their own fixture `ranks`
        metafunc.parametrize("ranks", metafunc.module.WORLDS, indirect=True, ids=str, scope="module")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    size, options = request.param
    with Ranks(size, make_runtime=runtime_with_blocks, **options) as made:
        yield made
