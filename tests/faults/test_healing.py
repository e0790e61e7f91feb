"""Runs a few cases in which ranks that serve a mixture of experts are killed and replaced.

`make test-faults COUNT=1000` runs 1000 cases.
"""

from __future__ import annotations

import pytest

from support.faults.healing import run

pytestmark = [pytest.mark.slow, pytest.mark.host_only(reason="more processes than most machines have GPUs")]


@pytest.mark.parametrize("seed", range(3))
def test_experts_heal_whenever_ranks_are_killed(seed: int) -> None:
    findings, case = run(seed)
    assert findings == []
    assert case.kills
