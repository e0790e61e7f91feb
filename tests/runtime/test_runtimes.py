"""The runtime that a program gets if it does not ask for one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from proxyccl.device import runtimes
from proxyccl.device.errors import RuntimeUnavailableError
from proxyccl.device.runtimes import find_runtime

INSTALLED = "libc.so.6"


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Yields a dictionary that a test fills: {runtime whose packages are installed: number of its devices}."""
    found: dict[str, int] = {}

    def driver(name: str) -> SimpleNamespace:
        if name not in found:
            raise RuntimeUnavailableError(f"{name}: its Python packages are missing")
        return SimpleNamespace(device_count=lambda: found[name])

    monkeypatch.setattr(runtimes, "_driver", driver)
    runtimes._first_with_a_device.cache_clear()
    yield found
    runtimes._first_with_a_device.cache_clear()


@pytest.mark.parametrize(
    ("devices", "expected"),
    [({}, "host"), ({"cuda": 0}, "host"), ({"cuda": 2}, "cuda"), ({"cuda": 0, "hip": 1}, "hip"), ({"hip": 1}, "hip")],
)
def test_the_first_vendor_with_a_device_gives_the_default(
    drivers: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    devices: dict[str, int],
    expected: str,
) -> None:
    drivers.update(devices)
    monkeypatch.setattr(runtimes, "_NVIDIA_DRIVER", INSTALLED)
    monkeypatch.setattr(runtimes, "_AMD_NODES", (str(tmp_path),))
    assert find_runtime() == expected


def test_packages_of_a_vendor_without_a_driver_are_not_imported(
    drivers: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drivers.update(cuda=1, hip=1)
    monkeypatch.setattr(runtimes, "_NVIDIA_DRIVER", "libcuda-of-the-test.so.1")
    monkeypatch.setattr(runtimes, "_AMD_NODES", (str(tmp_path / "kfd"),))
    assert find_runtime() == "host"
