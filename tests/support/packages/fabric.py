"""libfabric and `ip` for tests: the machine's if it has them, else fetched once into build/fabric."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

import pytest

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
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return True


@functools.cache  # called before a fetched library is loaded, because that is found by its name from then on
def _is_installed() -> bool:
    return _loads(Path(LIBRARY)) and installed_program("ip") is not None


def environment() -> dict[str, str]:
    """This process's environment, in which a process finds the library."""
    return dict(os.environ) if _is_installed() else PACKAGES.environment()
