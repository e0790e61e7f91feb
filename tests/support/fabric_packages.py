"""libfabric and `ip` for tests: the machine's, else those that are fetched once into build/fabric."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import sys
from pathlib import Path

from support.debian_packages import UNAVAILABLE, installed_program
from support.once import one_at_a_time
from support.paths import ROOT

LIBRARY = "libfabric.so.1"
_DIRECTORY = ROOT / "build/fabric"


@functools.cache
def _fetched() -> str:
    """Why they can't be had here; empty if they can."""
    if _is_installed():
        return ""
    with one_at_a_time(ROOT / "build/fabric.lock"):
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests/support/fetch_fabric.py"), str(_DIRECTORY)],
            capture_output=True,
            text=True,
            check=False,
            timeout=280,
        )
    if done.returncode == UNAVAILABLE:
        return done.stdout.strip()
    return done.stderr if done.returncode else ""


def load_if_here() -> str | None:
    """Loads libfabric into this process, if it is installed or was fetched; fetches nothing.

    Returns its name, or the path of a fetched one, for PROXYCCL_LIBFABRIC; None if there is none. The libraries that a
    fetched one needs are found by their names because they are loaded before it.
    """
    if _is_installed():
        return LIBRARY
    waiting = sorted(_DIRECTORY.glob("usr/lib/*/lib*.so.*"))
    while waiting and (refused := [path for path in waiting if not _loads(path)]) != waiting:
        waiting = refused
    return next((str(path) for path in _DIRECTORY.glob(f"usr/lib/*/{LIBRARY}") if _loads(path)), None)


def _loads(library: Path) -> bool:
    try:
        ctypes.CDLL(str(library))
    except OSError:
        return False
    return True


@functools.cache  # asked before a fetched library is loaded, which is found by its name from then on
def _is_installed() -> bool:
    return _loads(Path(LIBRARY)) and installed_program("ip") is not None


def unavailable_reason() -> str:
    """Why there is no libfabric for tests; empty if there is."""
    return _fetched()


def environment() -> dict[str, str]:
    """This process's environment, in which a process finds the library."""
    own = dict(os.environ)
    if not _is_installed():
        (library,) = _DIRECTORY.glob(f"usr/lib/*/{LIBRARY}")
        own["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (str(library.parent), own.get("LD_LIBRARY_PATH"))))
    return own


def program(name: str) -> str:
    """The path of a program."""
    found = installed_program(name)
    if found is not None:
        return found
    (fetched,) = (path for path in Path(_DIRECTORY).glob(f"*bin/{name}"))
    return str(fetched)
