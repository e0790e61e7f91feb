"""Runs a few cases in which memory is freed during transfers. `make test-faults COUNT=1000` runs 1000 cases."""

from __future__ import annotations

import pytest

from support.faults.freed_memory import run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.host_only(reason="agents move the host's memory, whatever the runtime"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]


@pytest.mark.parametrize("path", ["self", "shared_memory", "process_vm", "unix", "tcp"])
def test_memory_that_ends_fails_its_own_transfers_alone(path: str) -> None:
    assert [finding for seed in range(3) for finding in run(seed, path)] == []
