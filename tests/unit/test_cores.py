"""The number of cores that a process may use on its machine and in its control groups, and each rank's share."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxyccl.device.process import cores
from proxyccl.device.process.cores import core_share, cores_allowed, usable_cores


@pytest.mark.parametrize(("allowed", "usable"), [(2.5, [1, 2, 2]), (0.5, [1, 1, 1]), (None, [1, 2, 64])])
def test_a_limit_is_rounded_down_to_a_core_at_least(
    monkeypatch: pytest.MonkeyPatch, allowed: float | None, usable: list[int]
) -> None:
    monkeypatch.setattr(cores, "cores_allowed", lambda: allowed)
    assert [usable_cores(found) for found in (1, 2, 64)] == usable


def test_a_limit_is_shared_by_the_ranks_of_its_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 128)
    monkeypatch.setattr(cores, "cores_allowed", lambda: 16.5)
    assert [core_share(8, beside) for beside in (1, 2, 8)] == [16, 8, 2]
    assert core_share(64, 1) == 2
    assert core_share(1000, 100) == 1


def test_the_smallest_quota_of_a_group_and_its_parents_counts(tmp_path: Path) -> None:
    own, root = tmp_path / "own", tmp_path / "mounted"
    own.write_text("0::/job/rank\n")
    assert cores_allowed(root, own) is None
    (root / "job/rank").mkdir(parents=True)
    (root / "job/rank/cpu.max").write_text("max 100000\n")
    assert cores_allowed(root, own) is None
    (root / "job/cpu.max").write_text("250000 100000\n")
    assert cores_allowed(root, own) == 2.5
    (root / "cpu.max").write_text("800000 100000\n")
    assert cores_allowed(root, own) == 2.5
    assert cores_allowed(root, tmp_path / "no such file") is None


def test_quotas_of_the_first_version_count_too(tmp_path: Path) -> None:
    own, group = tmp_path / "own", tmp_path / "mounted/cpu,cpuacct/job"
    own.write_text("5:memory:/job\n4:cpu,cpuacct:/job\n")
    group.mkdir(parents=True)
    (group / "cpu.cfs_period_us").write_text("50000\n")
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    assert cores_allowed(tmp_path / "mounted", own) is None
    (group / "cpu.cfs_quota_us").write_text("100000\n")
    assert cores_allowed(tmp_path / "mounted", own) == 2


@pytest.mark.parametrize(
    ("line", "file"),
    [("0::/job/rank", "job/rank/cpuset.cpus.effective"), ("3:cpuset:/job", "cpuset/job/cpuset.effective_cpus")],
    ids=["second-version", "first-version"],
)
@pytest.mark.parametrize(("listed", "allowed"), [("0-3,8\n", 5), ("7\n", 1), ("\n", None)])
def test_the_set_of_cores_counts_too(tmp_path: Path, line: str, file: str, listed: str, allowed: int | None) -> None:
    own, effective = tmp_path / "own", tmp_path / "mounted" / file
    own.write_text(line + "\n")
    effective.parent.mkdir(parents=True)
    effective.write_text(listed)
    assert cores_allowed(tmp_path / "mounted", own) == allowed
