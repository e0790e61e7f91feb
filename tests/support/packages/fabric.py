"""libfabric and `ip` for tests: the machine's if it has them, else fetched once into build/fabric."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxyccl.proxy.fabric.library import keeping_signal_handlers, load
from support.packages.debian import UnavailableError
from support.packages.fetched import FetchedPackages, installed_program

LIBRARY = "libfabric.so.1"
PACKAGES = FetchedPackages("fabric", "fetch_fabric.py")


@functools.cache
def unavailable_reason() -> str:
    """Why there is no libfabric for tests; empty if there is."""
    if not _is_installed():
        try:
            PACKAGES.fetch()
        except UnavailableError as error:
            return str(error)
    return ""


def load_if_here() -> str | None:
    """Loads libfabric into this process, if it is installed or was fetched; fetches nothing.

    Returns its name, or the path of a fetched one, for PROXYCCL_LIBFABRIC; None if there is none. The libraries that a
    fetched one needs are found by their names because they are loaded before it.
    """
    if _is_installed():
        return LIBRARY
    waiting = sorted(PACKAGES.directory.glob("usr/lib/*/lib*.so.*"))
    while waiting and (refused := [path for path in waiting if not _loads(path)]) != waiting:
        waiting = refused
    return next((str(path) for path in PACKAGES.directory.glob(f"usr/lib/*/{LIBRARY}") if _loads(path)), None)


def library_or_skip() -> str:
    """The result of `load_if_here`, for a fixture, after fetching it; skips the test where it can't be fetched."""
    if reason := unavailable_reason():
        pytest.skip(reason)
    found = load_if_here()
    assert found is not None
    return found


def _loads(library: Path) -> bool:
    try:
        with keeping_signal_handlers():
            ctypes.CDLL(str(library))
    except OSError:
        return False
    return True


@functools.cache
def _is_installed() -> bool:
    """Looked up by its file: a fetched one, or that of MPI, is found by the name once this process has loaded it."""
    return ctypes.util.find_library("fabric") is not None and installed_program("ip") is not None


def environment() -> dict[str, str]:
    """This process's environment, in which a process finds the library."""
    return dict(os.environ) if _is_installed() else PACKAGES.environment()


@contextlib.contextmanager
def this_library(library: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Meanwhile this process uses that libfabric, whichever it has used before, and its TCP on the loopback. Children
    that are to reach it do so too, and versions name the provider differently.
    """
    monkeypatch.setenv("PROXYCCL_LIBFABRIC", library)
    monkeypatch.setenv("PROXYCCL_FABRIC_PROVIDER", "tcp")
    monkeypatch.setenv("PROXYCCL_FABRIC_INTERFACE", "=lo")
    load.cache_clear()
    yield
    load.cache_clear()
