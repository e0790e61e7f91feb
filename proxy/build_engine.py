"""Declares the extension `proxyccl.proxy._engine`: the C code of the engine, its transports, and ranks' segments.

Setuptools runs this file at build time.
"""

import re
import runpy
from pathlib import Path

import cffi

ROOT = Path(__file__).parent.parent
ENGINE = ROOT / "proxy/engine"
TRANSPORTS = re.findall(r"each\((\w+)\)", (ENGINE / "transports.h").read_text())
OPTIONS = [f"{name}_transport" for name in TRANSPORTS if (ENGINE / f"{name}_transport.h").exists()]
"""The headers of the transports' options; a transport without options has no header."""
HEADERS = [
    *(f"device/include/proxyccl/{name}.h" for name in ("trigger", "control")),
    *(f"proxy/engine/{name}.h" for name in ("observe", "outcome", "runtime_table", "schedule", *OPTIONS, "engine")),
    *(f"proxy/engine/{name}.h" for name in ("transports", "wake_signal")),
    *(f"proxy/segment/{name}.h" for name in ("calls", "announcements", "rendezvous")),
    *(f"proxy/engine/{name}_objects.h" for name in ("fabric", "verbs")),
]
"""The headers that Python needs, each after the headers whose types it names."""


def files(pattern: str) -> list[str]:
    """Returns the extension's files that match `pattern`. Setuptools needs paths relative to the project."""
    return sorted(
        str(path.relative_to(ROOT)) for room in ("engine", "segment") for path in ROOT.glob(f"proxy/{room}/{pattern}")
    )


declarations = runpy.run_path(str(ROOT / "device/build_declarations.py"))["declarations"]
declared = declarations("\n".join((ROOT / header).read_text() for header in HEADERS))
ffi = cffi.FFI()
# Pointers to structs of the extension `_native` are declared as void pointers, because cffi does not share types
# between extensions.
ffi.cdef(re.sub(r"(const )?Proxyccl(Launch|StreamOperations) \*", "const void *", declared))
ffi.set_source(
    "proxyccl.proxy._engine",
    "\n".join(f'#include "{header}"' for header in HEADERS),
    sources=files("*.c"),
    depends=[
        *(*files("*.h"), *HEADERS, "device/include/proxyccl/platform_host_memmove.h"),
        *(f"device/{name}.h" for name in ("launch", "waking", "stream_operations")),
    ],
    # `make` fetches headers of libibverbs and libfabric into the last two directories if the system has none.
    include_dirs=[
        ".",
        "proxy/engine",
        "proxy/segment",
        "device",
        "device/include",
        "build/rdma-headers/usr/include",
        "build/fabric-headers/usr/include",
    ],
    extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden"],
)
