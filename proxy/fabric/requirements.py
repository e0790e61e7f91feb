"""Checks this machine for libfabric's requirements without loading libfabric, because every rank checks and few
machines have the library.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

from proxyccl.proxy._engine import lib

INSTALL = "apt install libfabric1 (Debian, Ubuntu), dnf install libfabric (Fedora); on AWS the EFA installer"
NEEDS = "libfabric's headers (Debian, Ubuntu: apt install libfabric-dev; Fedora: dnf install libfabric-devel)"
"""The build requirements of the transport."""

_LIBRARY = "libfabric.so.1"
_MAPS = Path("/proc/self/maps")
_LINKER_CACHE = Path("/etc/ld.so.cache")


def library_name() -> str:
    """The name or path of the library: ``PROXYCCL_LIBFABRIC``, else the one that the system's linker finds."""
    return os.environ.get("PROXYCCL_LIBFABRIC") or _LIBRARY


def missing() -> str:
    """The requirements of libfabric that this machine lacks, in words; empty if none.

    The check neither loads the library nor asks providers, which may take a second to answer. A process can load only
    one libfabric, and a newer one that MPI brings can't be loaded after the system's.
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
    except OSError:  # a system without such a cache
        return True  # unknown: loading the library will show
    # The cache (glibc, sysdeps/generic/dl-cache.h) ends with strings, in which the name may only be the end of a path.
    return re.search(rb"[/\0]" + re.escape(os.fsencode(name)) + rb"\0", cache) is not None
