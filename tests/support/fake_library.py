"""Libraries in C that stand in for devices, built by make from support/NAME."""

from __future__ import annotations

from typing import Any

import cffi

from support.once import run_make
from support.paths import ROOT


def load(name: str, stem: str) -> tuple[Any, Any]:
    """cffi's view of the library of `tests/support/NAME/STEM.h`: ffi and lib."""
    run_make(f"fake-{name}")
    ffi = cffi.FFI()
    header = (ROOT / f"tests/support/{name}/{stem}.h").read_text()
    ffi.cdef("\n".join(line for line in header.split("\n") if not line.startswith("#")))
    return ffi, ffi.dlopen(str(ROOT / f"build/fake-{name}/lib{stem}.so"))
