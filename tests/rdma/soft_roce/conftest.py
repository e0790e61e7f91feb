"""Fixtures for the tests that run in the machine with Soft-RoCE (tests/support/soft_roce)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.soft_roce.wire import IN_MACHINE, Wire

if not IN_MACHINE:
    pytest.exit(
        "tests/rdma/soft_roce runs in a machine with Soft-RoCE devices: make test-rdma", pytest.ExitCode.USAGE_ERROR
    )


@pytest.fixture
def wire() -> Iterator[Wire]:
    """The wire between the devices, which is restored after each test."""
    wire = Wire()
    try:
        yield wire
    finally:
        wire.restore()
