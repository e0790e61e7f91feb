"""Pinned memory without users stays pinned while ranks of several devices have open groups."""

import pytest

from proxyccl.device.gpu import kept_pins
from proxyccl.device.gpu.kept_pins import KeptPins


class Pins:
    """Pinned memory, by name, and what was unpinned, in order."""

    def __init__(self) -> None:
        self.kept = KeptPins()
        self.unpinned: list[str] = []

    def release(self, name: str, nbytes: int = 4096) -> None:
        self.kept.release(nbytes, lambda: self.unpinned.append(name))


def test_without_ranks_and_with_those_of_one_device_memory_is_unpinned_at_once() -> None:
    pins = Pins()
    pins.release("before")
    for _ in range(2):
        pins.kept.begin_rank("cuda", 1)
    pins.release("with two groups of one device")
    assert pins.unpinned == ["before", "with two groups of one device"]


def test_while_ranks_of_several_devices_are_open_it_is_kept() -> None:
    pins = Pins()
    for device in (0, 1, 2, 1):
        pins.kept.begin_rank("cuda", device)
    pins.release("a")
    pins.kept.end_rank("cuda", 0)
    pins.release("b")
    pins.kept.end_rank("cuda", 1)
    assert pins.unpinned == []
    pins.kept.end_rank("cuda", 1)
    assert pins.unpinned == ["a", "b"]
    pins.release("c")
    assert pins.unpinned == ["a", "b", "c"]


def test_beyond_the_limit_the_oldest_are_unpinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_pins, "_MOST_BYTES", 10_000)
    pins = Pins()
    for device in range(2):
        pins.kept.begin_rank("cuda", device)
    for name in "abc":
        pins.release(name)
    assert pins.unpinned == ["a"]


def test_what_an_unpinning_releases_is_unpinned_too() -> None:
    pins = Pins()
    pins.kept.release(1, lambda: pins.release("inner"))
    assert pins.unpinned == ["inner"]
