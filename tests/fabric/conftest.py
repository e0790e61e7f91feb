"""Fixtures for the tests of the fabric transport."""

from __future__ import annotations

import pytest

from support.packages.fabric import load_if_here, unavailable_reason


@pytest.fixture(scope="session")
def library() -> str:
    """The library to load: searched for only once, because a loaded library is found by its name from then on."""
    if reason := unavailable_reason():
        pytest.skip(reason)
    found = load_if_here()
    assert found is not None
    return found
