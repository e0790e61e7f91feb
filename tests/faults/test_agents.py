"""Agents that come and go under load, a few. `make test-faults COUNT=1000` runs more."""

from __future__ import annotations

import pytest

from proxyccl.channels.transfers.paths import PATHS
from support.faults.agents import run

pytestmark = pytest.mark.host_only(reason="agents move the host's memory, whatever the runtime")


@pytest.mark.parametrize("path", PATHS)
def test_agents_come_and_go_under_load(path: str) -> None:
    assert run(1, 9, path) == []
