"""A process's memory limit is the minimum of the machine's memory and of its control groups' limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxyccl.device.memory.machine_memory import Limit, free_memory, memory_limit

MIB = 1 << 20


def system(path: Path, groups: str, limits: dict[str, str]) -> None:
    (path / "proc/self").mkdir(parents=True)
    (path / "proc/meminfo").write_text("MemTotal:        4096 kB\nMemFree:  1 kB\nSwapTotal:       1024 kB\n")
    (path / "proc/self/cgroup").write_text(groups)
    for name, text in limits.items():
        (path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (path / "groups" / name).write_text(f"{text}\n")


@pytest.mark.parametrize(
    ("groups", "limits", "nbytes", "origin"),
    [
        ("", {}, 5 * MIB, "this machine has"),
        ("0::/a/b\n", {"a/b/memory.max": "max"}, 5 * MIB, "this machine has"),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": str(MIB)}, 2 * MIB, "groups/a/memory.max allows"),
        ("0::/gone\n", {"memory.max": str(MIB)}, 2 * MIB, "groups/memory.max allows"),
        (
            "4:cpu,memory:/a\n0::/\n",
            {"memory/a/memory.limit_in_bytes": str(2 * MIB), "memory/memory.limit_in_bytes": str(1 << 62)},
            3 * MIB,
            "groups/memory/a/memory.limit_in_bytes allows",
        ),
    ],
)
def test_the_smallest_limit_counts_and_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, groups: str, limits: dict[str, str], nbytes: int, origin: str
) -> None:
    system(tmp_path, groups, limits)
    limit = memory_limit(tmp_path / "proc", tmp_path / "groups")
    assert limit is not None
    assert limit.nbytes == nbytes
    assert str(limit).replace(f"{tmp_path}/", "") == f"{origin} {nbytes} bytes of memory and swap space"


def test_a_system_that_tells_nothing_has_no_limit(tmp_path: Path) -> None:
    assert memory_limit(tmp_path, tmp_path) is None
    assert free_memory(tmp_path, tmp_path) == 1 << 63


@pytest.mark.parametrize(("limit", "left"), [("max", 3.5 * MIB), (str(MIB), 2 * MIB)])
def test_free_memory_is_at_most_the_limit(tmp_path: Path, limit: str, left: int) -> None:
    system(tmp_path, "0::/a\n", {"a/memory.max": limit})
    with (tmp_path / "proc/meminfo").open("a") as info:
        info.write("MemAvailable: 3072 kB\nSwapFree: 512 kB\n")
    assert free_memory(tmp_path / "proc", tmp_path / "groups") == left


def test_a_large_allocation_says_which_limit_it_exceeds(monkeypatch: pytest.MonkeyPatch) -> None:
    from proxyccl.device.errors import ResourceError
    from proxyccl.device.memory import shared_memory

    monkeypatch.setattr(shared_memory, "memory_limit", lambda: Limit(100 * MIB, "this machine has"))
    with pytest.raises(
        ResourceError, match=rf"can't allocate {101 * MIB} bytes .*: this machine has {100 * MIB} bytes"
    ):
        shared_memory.SharedMemory.allocate(101 * MIB)
    shared_memory.SharedMemory.allocate(100 * MIB).close()
