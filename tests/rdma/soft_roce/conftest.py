"""Fixtures for the tests that run in the machine with Soft-RoCE (tests/support/soft_roce)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from proxyccl.device.build.compile_cache import cache_dir
from support.soft_roce.wire import IN_MACHINE, Wire

if not IN_MACHINE:
    pytest.exit(
        "tests/rdma/soft_roce runs in a machine with Soft-RoCE devices: make test-rdma", pytest.ExitCode.USAGE_ERROR
    )


# The limit on peers is low, because libfabric's queues have 256 entries per peer, and Soft-RoCE permits 32767 entries.
os.environ.setdefault("FI_UNIVERSE_SIZE", "16")
# libfabric's cache would keep deregistered memory registered and readable by peers.
os.environ.setdefault("FI_MR_CACHE_MAX_COUNT", "0")


@pytest.fixture
def wire() -> Iterator[Wire]:
    """The wire between the devices, which is restored after each test."""
    wire = Wire()
    try:
        yield wire
    finally:
        wire.restore()


@pytest.fixture(autouse=True)
def _compiled_outside(pytestconfig: pytest.Config) -> Iterator[None]:
    """Fails a test of `make test` that compiled kernels inside the machine, which takes ten times as long as most
    tests.
    """
    before = {path.name for path in cache_dir().iterdir()}
    yield
    added = {path.name for path in cache_dir().iterdir()} - before
    assert not added or pytestconfig.getoption("--full"), (
        "the kernels that a line of the output names were compiled in here: add them to support/soft_roce/kernels.py"
    )
