"""Provides libfabric and `ip` to tests; if they are not installed, fetches them once into build/fabric."""

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
    """Fetches libfabric if it is not installed. Returns why the fetch failed, or ""."""
    if not _is_installed():
        try:
            PACKAGES.fetch()
        except UnavailableError as error:
            return str(error)
    return ""


def load_if_here() -> str | None:
    """Loads libfabric into this process if it is installed or was already fetched.

    Returns the installed library's name or the fetched library's path, for PROXYCCL_LIBFABRIC; None if there is
    neither. Dependencies of a fetched libfabric are loaded first, so that the loader finds them by name.
    """
    if _is_installed():
        return LIBRARY
    waiting = sorted(PACKAGES.directory.glob("usr/lib/*/lib*.so.*"))
    while waiting and (refused := [path for path in waiting if not _loads(path)]) != waiting:
        waiting = refused
    return next((str(path) for path in PACKAGES.directory.glob(f"usr/lib/*/{LIBRARY}") if _loads(path)), None)


def library_or_skip() -> str:
    """Fetches libfabric if needed, and returns the result of `load_if_here`. Skips the test if libfabric can't be
    fetched.
    """
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
    """Returns whether libfabric and `ip` are installed. Does not use dlopen, which would also find a fetched libfabric,
    or MPI's, that this process has loaded.
    """
    return ctypes.util.find_library("fabric") is not None and installed_program("ip") is not None


def environment() -> dict[str, str]:
    """Returns this process's environment, with libfabric on the library path."""
    return dict(os.environ) if _is_installed() else PACKAGES.environment()


@contextlib.contextmanager
def this_library(library: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes this process and its children use the given libfabric during the test, with the TCP provider on the
    loopback interface.
    """
    monkeypatch.setenv("PROXYCCL_LIBFABRIC", library)
    monkeypatch.setenv("PROXYCCL_FABRIC", "provider=tcp,interface==lo")
    load.cache_clear()
    yield
    load.cache_clear()
