"""Declares the extension `proxyccl.proxy._bare_loops`: C loops that benchmarks compare the engine with.

Run by setuptools at build time.
"""

import cffi

ffi = cffi.FFI()

ffi.cdef("""
uint64_t proxyccl_bare_drain(uintptr_t slots, uintptr_t tail, uint32_t size_log2, uint64_t count, uint64_t timeout_ns);
uint64_t proxyccl_bare_produce(uintptr_t slots, uintptr_t tail, uint32_t size_log2, uint64_t first_ticket,
                               uint64_t count, uint64_t word0, uint64_t word1, uint64_t timeout_ns);

typedef struct {
  uintptr_t qp; uintptr_t cq; uint64_t local; uint64_t remote; uint32_t lkey; uint32_t rkey; uint32_t bytes;
  uint32_t depth; uint32_t chain; uint32_t signal_every; uint64_t count; uint64_t timeout_ns; ...;
} ProxycclVerbsBareWrites;
int64_t proxyccl_verbs_bare_writes(const ProxycclVerbsBareWrites *options);

typedef struct {
  uintptr_t endpoint; uintptr_t queue; uint64_t peer; uint64_t local; uint64_t remote; uintptr_t descriptor;
  uint64_t key; uint64_t bytes; uint32_t depth; uint32_t complete_every; uint64_t count; uint64_t timeout_ns; ...;
} ProxycclFabricBareWrites;
int64_t proxyccl_fabric_bare_writes(const ProxycclFabricBareWrites *options);
int proxyccl_fabric_bare_serve(uintptr_t queue, uint64_t for_ns);
""")

ffi.set_source(
    "proxyccl.proxy._bare_loops",
    """
#include "fabric_loop.h"
#include "ring_loops.h"
#include "verbs_loop.h"
""",
    sources=["proxy/bench/fabric_loop.c", "proxy/bench/ring_loops.c", "proxy/bench/verbs_loop.c"],
    depends=[
        "proxy/bench/fabric_loop.h",
        "proxy/bench/ring_loops.h",
        "proxy/bench/verbs_loop.h",
        "proxy/engine/clock.h",
        "proxy/engine/ring.h",
        "proxy/engine/verbs_transport.h",
        "device/include/proxyccl/trigger.h",
    ],
    # The last two exist where `make` had to fetch libibverbs' and libfabric's headers.
    include_dirs=[
        "proxy/bench",
        "proxy/engine",
        "device/include",
        "build/rdma-headers/usr/include",
        "build/fabric-headers/usr/include",
    ],
    extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden"],
)
