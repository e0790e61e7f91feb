"""Fixtures for the tests of the fabric transport."""

from __future__ import annotations

import pytest

from support.packages.fabric import library_or_skip


@pytest.fixture(scope="session")
def library() -> str:
    """The library to load: searched for only once, because a loaded library is found by its name from then on."""
    return library_or_skip()
