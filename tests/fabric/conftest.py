"""What tests of the fabric transport share."""

from __future__ import annotations

import pytest

from support.packages.fabric import load_if_here, unavailable_reason


@pytest.fixture(scope="session")
def library() -> str:
    """What to load: looked for once, as a library that is loaded is found by its name from then on."""
    if reason := unavailable_reason():
        pytest.skip(reason)
    found = load_if_here()
    assert found is not None
    return found
