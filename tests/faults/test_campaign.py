"""The campaign of faults, with a few cases. `make test-faults COUNT=1000` runs more."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.faults.campaign import Campaign
from support.faults.case import FAULTS, Case

pytestmark = pytest.mark.host_only(reason="its ranks are on the host runtime")

WITH_FAULTS = ("kill", "exit", "wrong arguments", "garbage", "fork", "signals", "full disk", "clock jumps")
CASES = [Case.of(FAULTS.index(fault)) for fault in WITH_FAULTS]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fault)
def test_every_rank_ends_in_time_by_name_and_the_rest_goes_on(case: Case, tmp_path: Path) -> None:
    campaign = Campaign(tmp_path)
    if reason := campaign.why_not(case):
        pytest.skip(reason)
    assert campaign.run(case) == []


def test_a_seed_gives_the_same_case_again() -> None:
    assert [Case.of(seed) for seed in range(64)] == [Case.of(seed) for seed in range(64)]
    assert {Case.of(seed).fault for seed in range(64)} == set(FAULTS)
