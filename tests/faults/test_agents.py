"""Runs a few cases in which agents start and exit under load, or restart under the same names.

`make test-faults COUNT=1000` runs 1000 cases.
"""

from __future__ import annotations

import pytest

from support.agents import PATHS
from support.faults.agents import run, run_lives
from support.packages.fabric import library_or_skip
from support.transports import needs_fabric

pytestmark = [pytest.mark.slow, pytest.mark.host_only(reason="agents move the host's memory, whatever the runtime")]


@pytest.mark.parametrize("path", PATHS)
def test_agents_come_and_go_under_load(path: str) -> None:
    assert run(1, 9, path) == []


@pytest.mark.parametrize("seed", range(1 + len(PATHS)))
def test_agents_start_again_under_their_names(seed: int) -> None:
    assert run_lives(seed) == []


@needs_fabric
def test_agents_come_and_go_by_libfabric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXYCCL_LIBFABRIC", library_or_skip())
    monkeypatch.setenv("PROXYCCL_FABRIC", "provider=tcp,interface==lo")
    monkeypatch.setenv("PROXYCCL_TRANSFER_PATHS", "fabric")  # of the peers
    assert run(1, 9, "fabric") == []
