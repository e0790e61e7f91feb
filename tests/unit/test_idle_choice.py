"""The default idle policy depends on the number of cores that are left for a proxy's threads."""

from __future__ import annotations

import pytest

from proxyccl.proxy import thread
from proxyccl.proxy.thread import IdlePolicy, choose_idle

FEW, ENOUGH = IdlePolicy(), IdlePolicy.where_cores_suffice()


@pytest.mark.parametrize(
    ("cores", "programs", "threads", "allowed", "chosen"),
    [
        (2, 1, 1, None, ENOUGH),
        (2, 4, 4, None, FEW),
        (8, 4, 4, None, ENOUGH),
        (7, 4, 4, None, FEW),
        (64, 4, 8, None, ENOUGH),
        (64, 4, 4, 7.5, FEW),
        (64, 4, 4, 8.0, ENOUGH),
    ],
)
def test_a_thread_stays_awake_where_each_program_and_each_thread_has_a_core(
    monkeypatch: pytest.MonkeyPatch, cores: int, programs: int, threads: int, allowed: float | None, chosen: IdlePolicy
) -> None:
    monkeypatch.setattr(thread, "cores_allowed", lambda: allowed)
    assert choose_idle(cores, programs, threads) == chosen


def test_the_quota_is_for_the_own_container_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread, "cores_allowed", lambda: 2.5)
    assert choose_idle(64, 8, 8) == FEW
    assert choose_idle(64, 8, 8, (1, 1)) == ENOUGH
    assert choose_idle(15, 8, 8, (1, 1)) == choose_idle(64, 8, 8, (2, 1)) == FEW


def test_policies_are_ordered_by_how_soon_they_wake() -> None:
    assert ENOUGH.max_sleep_us < FEW.max_sleep_us
    assert IdlePolicy.most_awake([FEW, ENOUGH]) == ENOUGH
    awake = IdlePolicy.always_awake()
    assert IdlePolicy.most_awake([ENOUGH, awake, FEW]) == awake
    assert str(awake) == "always awake"
