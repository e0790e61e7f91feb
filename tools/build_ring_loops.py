"""Declares the extension `proxyccl.tools._ring_loops`: C loops that only drain or fill a ring.

Run by setuptools at build time.
"""

import cffi

ffi = cffi.FFI()

ffi.cdef("""
uint64_t proxyccl_bare_drain(uintptr_t slots, uintptr_t tail, uint32_t size_log2, uint64_t count, uint64_t timeout_ns);
uint64_t proxyccl_bare_produce(uintptr_t slots, uintptr_t tail, uint32_t size_log2, uint64_t first_ticket,
                               uint64_t count, uint64_t word0, uint64_t word1, uint64_t timeout_ns);
""")

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
