"""Fixtures of the runtimes' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from proxyccl.device.runtime import Runtime
from proxyccl.device.runtimes import open_runtime
from support.devices import RUNTIME


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """Opens the tests' runtime on device 0 and makes its context current. Synchronizes the device after the test."""
    opened = open_runtime(RUNTIME, 0)
    with opened.current():
        yield opened
        opened.synchronize()
