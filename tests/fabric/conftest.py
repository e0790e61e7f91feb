from __future__ import annotations

import pytest

from support.packages.fabric import library_or_skip


@pytest.fixture(scope="session")
def library() -> str:
    return library_or_skip()
