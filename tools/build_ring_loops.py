"""Declares the extension `proxyccl.tools._ring_loops`: C loops that only drain or fill a ring.

Run by setuptools at build time.
"""

import runpy
from pathlib import Path

import cffi

ROOT = Path(__file__).parent.parent

declarations = runpy.run_path(str(ROOT / "device/build_declarations.py"))["declarations"]
ffi = cffi.FFI()
ffi.cdef(declarations((ROOT / "tools/ring_loops.h").read_text()))
ffi.set_source(
    "proxyccl.tools._ring_loops",
    '#include "ring_loops.h"',
    sources=["tools/ring_loops.c"],
    depends=[
        "tools/ring_loops.h",
        "proxy/engine/clock.h",
        "proxy/engine/ring.h",
        "device/include/proxyccl/trigger.h",
    ],
    include_dirs=["tools", "proxy/engine", "device/include"],
    extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden"],
)
