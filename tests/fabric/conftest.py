"""Fixtures for the tests of the fabric transport."""

from __future__ import annotations

import pytest

from support.packages.fabric import library_or_skip


@pytest.fixture(scope="session")
def library() -> str:
    """Returns the libfabric to load. It is searched for only once, because a library that is loaded is found by name
    from then on.
    """
    return library_or_skip()
