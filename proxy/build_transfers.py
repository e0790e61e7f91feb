"""Declares the extension `proxyccl.proxy._transfers`: the C engine of transfers between agents.

Setuptools runs this file at build time.
"""

import runpy
from pathlib import Path

import cffi

ROOT = Path(__file__).parent.parent
TRANSFERS = ROOT / "proxy/transfers"


def in_transfers(pattern: str) -> list[str]:
    """Returns the extension's files that match `pattern`. Setuptools needs paths relative to the project."""
    return sorted(f"proxy/transfers/{path.name}" for path in TRANSFERS.glob(pattern))


declarations = runpy.run_path(str(ROOT / "device/build_declarations.py"))["declarations"]
ffi = cffi.FFI()
ffi.cdef(declarations((TRANSFERS / "transfers.h").read_text()))
ffi.set_source(
    "proxyccl.proxy._transfers",
    '#include "transfers.h"',
    sources=in_transfers("*.c"),
    depends=[
        *in_transfers("*.h"),
        *(f"proxy/engine/{name}.h" for name in ("clock", "fabric_queue", "fabric_transport", "runtime_table")),
        *("device/launch.h", "device/waking.h"),
    ],
    include_dirs=[
        *("proxy/transfers", "proxy/engine", "device"),
        "build/fabric-headers/usr/include",  # `make` puts headers that the system lacks into this directory
    ],
    define_macros=[("_GNU_SOURCE", None)],  # process_vm_readv, accept4
    extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden"],
)
