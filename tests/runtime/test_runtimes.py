"""The runtime that a program gets if it does not ask for one."""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.util import module_from_spec
from types import SimpleNamespace

import pytest

from proxyccl.device import runtimes
from proxyccl.device.errors import RuntimeUnavailableError

VENDORS = {"cuda": "CudaDriver", "hip": "HipDriver"}


def found(monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], devices: dict[str, int]) -> str:
    """Returns what `find_runtime` finds, in a new copy of its module, if the kernel drivers of these vendors are
    installed, and `devices` is {runtime whose packages are installed: number of its devices}.
    """

    def driver(name: str) -> SimpleNamespace:
        if name not in devices:
            raise RuntimeUnavailableError(f"{name}: its Python packages are missing")
        return SimpleNamespace(device_count=lambda: devices[name])

    def load(name: str) -> object:
        if "cuda" not in installed:
            raise OSError(f"{name} is not installed")
        return object()

    for name, kind in VENDORS.items():
        module = SimpleNamespace(**{kind: lambda name=name: driver(name)})
        monkeypatch.setitem(sys.modules, f"proxyccl.device.gpu.{name}", module)
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(os.path, "exists", lambda path: "hip" in installed)
    spec = runtimes.__spec__
    assert spec is not None
    assert spec.loader is not None
    copy = module_from_spec(spec)
    spec.loader.exec_module(copy)
    return str(copy.find_runtime())


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ({}, "host"),
        ({"cuda": 0}, "host"),
        ({"cuda": 2, "hip": 1}, "cuda"),
        ({"cuda": 0, "hip": 1}, "hip"),
        ({"hip": 1}, "hip"),
    ],
)
def test_the_first_vendor_with_a_device_gives_the_default(
    monkeypatch: pytest.MonkeyPatch, devices: dict[str, int], expected: str
) -> None:
    assert found(monkeypatch, ("cuda", "hip"), devices) == expected


def test_packages_of_a_vendor_without_a_driver_are_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, (), {"cuda": 1, "hip": 1}) == "host"
