"""Checks whether this machine meets the requirements of the transport over libfabric. The check does not load
libfabric, because every rank makes the check and few machines have libfabric.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from proxyccl.proxy._engine import lib

INSTALL = "apt install libfabric1 (Debian, Ubuntu), dnf install libfabric (Fedora); on AWS the EFA installer"
NEEDS = "libfabric's headers (Debian, Ubuntu: apt install libfabric-dev; Fedora: dnf install libfabric-devel)"
"""The transport's build requirements, in words."""

_LIBRARY = "libfabric.so.1"
_MAPS = Path("/proc/self/maps")
_LINKER_CACHE = Path("/etc/ld.so.cache")


def library_name() -> str:
    """Returns the library's path from ``PROXYCCL_LIBFABRIC`` if it is set, otherwise the name by which the system's
    linker finds the library.
    """
    return os.environ.get("PROXYCCL_LIBFABRIC") or _LIBRARY


def missing() -> str:
    """Returns, as text, the requirements of the transport over libfabric that this machine lacks; "" if it lacks none.

    The check does not query providers, because a query may take a second. The check does not load the library, because
    a process can load only one libfabric: if the check loaded the system's libfabric, MPI could not load a newer
    version.
    """
    lacks = []
    if not lib.proxyccl_fabric_built():
        lacks.append(f"the engine was built without {NEEDS}; reinstall proxyccl with them")
    if not _is_there(library_name()):
        lacks.append(f"libfabric can't be loaded (there is no {library_name()}): {INSTALL}")
    return "; ".join(lacks)


@functools.cache
def _is_there(name: str) -> bool:
    if "/" in name:
        return Path(name).exists()
    directories = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    if any(Path(directory, name).exists() for directory in directories) or name in _MAPS.read_text():
        return True
    try:
        cache = _LINKER_CACHE.read_bytes()
    except OSError:  # without the linker's cache, only loading the library would show whether the library exists
        return True
    # The cache (glibc, sysdeps/generic/dl-cache.h) contains the libraries' names and paths as strings.
    return re.search(rb"[/\0]" + re.escape(os.fsencode(name)) + rb"\0", cache) is not None
