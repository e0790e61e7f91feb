"""`proxyccl compile`: compiles shipped kernels into the cache, for this machine's GPUs or for architectures by name.
On a machine without GPUs, the command compiles the kernels for the CPU.

The command compiles the kernels of the expert-parallel layer for all element types, the kernels of collectives that
only move bytes, the kernels of sums and averages of float32 and bfloat16, which a training step needs, and the kernels
of transfers and weights. Compilers need no GPU, so a container image with the cache can be built on any machine. The
paths of the package and of the cache must be the same in the image as on the cluster.
"""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from proxyccl.channels.collectives.table import KERNELS_OF_STEPS
from proxyccl.channels.expert_parallel.config import SCALED_DTYPES, TOKEN_DTYPES
from proxyccl.channels.expert_parallel.geometry import AS_BYTES, DISPATCH_KERNELS, STORE_KERNEL
from proxyccl.device.build.ahead_of_time import Shipped, compile_kernels
from proxyccl.device.build.compile_cache import cache_dir
from proxyccl.device.errors import ArgumentError
from proxyccl.device.host.shipped_libraries import ships_kernels
from proxyccl.device.process.cores import usable_cores
from proxyccl.device.runtimes import find_runtime, open_compiler, open_driver, open_runtime

EXPERT_KERNELS: tuple[Shipped, ...] = (
    *(("experts/dispatch.h", kernel, AS_BYTES, None) for kernel in (*DISPATCH_KERNELS.values(), STORE_KERNEL)),
    *(
        ("experts/dispatch.h", kernel, dtype, None)
        for announced, kernel in DISPATCH_KERNELS.items()
        if announced != "ids"  # a layer that announces ids has no output buffers
        for dtype in SCALED_DTYPES
    ),
    *(("experts/combine.h", "combine", dtype, None) for dtype in TOKEN_DTYPES),
    *(("experts/weigh.h", "expert_weigh", dtype, None) for dtype in TOKEN_DTYPES),
    ("experts/spread.h", "expert_spread", None, None),
    ("experts/places.h", "expert_places", None, None),
    ("experts/quantize.h", "expert_pack", None, None),
    *(("experts/quantize.h", "expert_quantize", dtype, None) for dtype in TOKEN_DTYPES),
    ("moves.h", "barrier", None, None),
    ("signal_peer.h", "signal_peer", None, None),
    ("engram_fetch.h", "engram_fetch_impl", None, None),
    ("copy_blocks.h", "copy_blocks", None, None),
    ("cast_weights.h", "cast_weights", None, None),
    ("cast_weights.h", "amax_of_weights", None, None),
)


def runtime_of(architecture: str) -> str:
    """Returns the runtime for a GPU's architecture: "cuda" for "sm_90", "hip" for "gfx942". Raises ArgumentError."""
    for prefix, runtime in (("sm_", "cuda"), ("gfx", "hip")):
        if architecture.startswith(prefix) and architecture[len(prefix) :].isalnum():
            return runtime
    raise ArgumentError("arch", f"{architecture!r} is not a GPU architecture, such as sm_90 or gfx942")


def compile_all(architecture: str, kernels: Sequence[Shipped]) -> tuple[int, int]:
    """Compiles one kernel per core at a time. Raises the errors of `compile_kernels` and `runtime_of`."""
    compiler, threads = open_compiler(runtime_of(architecture)), usable_cores(len(os.sched_getaffinity(0)))
    return compile_kernels(compiler, architecture, kernels, threads)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--arch",
        action="append",
        default=[],
        metavar="ARCH",
        help="architecture of the GPUs, such as sm_90 or gfx942; may be repeated (default: this machine's)",
    )


def run(parsed: Namespace) -> int:
    kernels = (*EXPERT_KERNELS, *KERNELS_OF_STEPS)
    for architecture in parsed.arch or _here():
        began = time.perf_counter()
        made, cached = compile_all(architecture, kernels)
        seconds = time.perf_counter() - began
        print(f"{architecture}: {made} compiled in {seconds:.1f} s, {cached} were already in {cache_dir()}")
    return 0


def _here() -> list[str]:
    name = os.environ.get("PROXYCCL_RUNTIME") or find_runtime()
    if name != "host":
        driver = open_driver(name)
        return sorted({driver.device(device).architecture for device in range(driver.device_count())})
    _compile_for_the_host()
    return []


def _compile_for_the_host() -> None:
    kernels = (*EXPERT_KERNELS, *KERNELS_OF_STEPS)
    host = open_runtime("host")
    began = time.perf_counter()
    with ThreadPoolExecutor(usable_cores(len(os.sched_getaffinity(0)))) as pool:
        list(pool.map(lambda kernel: host.shipped(*kernel), kernels))
    if ships_kernels():
        print("host: its kernels were compiled when the package was built; name a GPU's architecture with --arch")
    else:
        print(f"host: {len(kernels)} kernels are in {cache_dir()}, after {time.perf_counter() - began:.1f} s")
