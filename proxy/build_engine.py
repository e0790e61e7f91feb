"""Declares the extension `proxyccl.proxy._engine`: the C engine and its transports. Run by setuptools at build time."""

import re
import runpy
from pathlib import Path

import cffi

ROOT = Path(__file__).parent.parent
ENGINE = ROOT / "proxy/engine"
TRANSPORTS = re.findall(r"each\((\w+)\)", (ENGINE / "transports.h").read_text())
OPTIONS = [f"{name}_transport" for name in TRANSPORTS if (ENGINE / f"{name}_transport.h").exists()]
"""The headers of their options; a transport without options has none."""
HEADERS = [
    *(f"device/include/proxyccl/{name}.h" for name in ("trigger", "control")),
    *(f"proxy/engine/{name}.h" for name in ("observe", "outcome", "runtime_table", "schedule", *OPTIONS, "engine")),
    *(f"proxy/engine/{name}.h" for name in ("transports", "calls", "announcements", "rendezvous", "wake_signal")),
    *(f"proxy/engine/{name}_objects.h" for name in ("fabric", "verbs")),
]
"""Those that Python needs, each after those whose types it names."""


def in_engine(pattern: str) -> list[str]:
    """Paths of the engine's files, relative to the project as setuptools wants them."""
    return sorted(f"proxy/engine/{path.name}" for path in ENGINE.glob(pattern))


declarations = runpy.run_path(str(ROOT / "device/build_declarations.py"))["declarations"]
declared = declarations("\n".join((ROOT / header).read_text() for header in HEADERS))
ffi = cffi.FFI()
# Any pointers: launches and operations are structs of `_native`, whose types are not this extension's to cffi.
ffi.cdef(re.sub(r"(const )?Proxyccl(Launch|StreamOperations) \*", "const void *", declared))
ffi.set_source(
    "proxyccl.proxy._engine",
    "\n".join(f'#include "{header}"' for header in HEADERS),
    sources=in_engine("*.c"),
    depends=[
        *(*in_engine("*.h"), *HEADERS, "device/include/proxyccl/platform_host_memmove.h"),
        *(f"device/{name}.h" for name in ("launch", "waking", "stream_operations")),
    ],
    # The last two exist where `make` had to fetch libibverbs' and libfabric's headers.
    include_dirs=[
        ".",
        "proxy/engine",
        "device",
        "device/include",
        "build/rdma-headers/usr/include",
        "build/fabric-headers/usr/include",
    ],
    extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden"],
)
