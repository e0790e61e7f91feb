"""Fixtures for the expert-parallel layer's tests."""

from collections.abc import Iterator

import pytest

from support.ranks import Ranks


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks
