"""Compiles the kernels of the RDMA tests outside the emulated machine, where compiling would be slow.

python tests/support/soft_roce/kernels.py DIRECTORY

This program also compiles an example's kernels, the shipped kernels that the tests use, and all Python files (tests
with pytest's rewriting). The compiled kernels are in the cache that all tests share, and copies are in DIRECTORY.
"""

import compileall
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import proxyccl
from proxyccl.channels.collectives.table import (
    ALL_REDUCE_KERNELS,
    COLLECTIVES,
    REDUCTION_OF_SCHEDULES,
    CollectiveKernel,
)
from proxyccl.device.host import HostRuntime
from proxyccl.tools.compile import EXPERT_KERNELS

OF_ALL_REDUCE = [("int64", "sum"), ("bfloat16", "sum"), ("float32", "avg")]
REDUCTIONS: dict[CollectiveKernel, list[tuple[str, str]]] = {
    ALL_REDUCE_KERNELS["ring"]: OF_ALL_REDUCE,
    ALL_REDUCE_KERNELS["proxy"]: [*OF_ALL_REDUCE, ("float32", "sum"), ("float32", "max")],
    REDUCTION_OF_SCHEDULES: [*OF_ALL_REDUCE, ("float32", "sum"), ("float32", "max"), ("int32", "sum")],
    COLLECTIVES["reduce_scatter"][0]: [("int32", "sum"), ("int64", "sum")],
}
"""The kernels that reduce where not all memory is mapped, with the types and operations of the tests."""
SHIPPED = [
    *(kernel for kernel in EXPERT_KERNELS if kernel[2] in {None, "float32", "uint8"}),
    *((kernel.file, kernel.name, *instance) for kernel, instances in REDUCTIONS.items() for instance in instances),
    *(
        (kernel.file, kernel.name, None, None)
        for kernel in dict.fromkeys(kernel for kernels in COLLECTIVES.values() for kernel in kernels)
        if not kernel.reduces
    ),
    *(("execute_plan.h", "execute_plan", dtype, None) for dtype in ("uint8", "float32")),
]

KERNELS = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
using Channels = DeviceHandle<ProxyChannel>*;
extern "C" __global__ void exchange(Channels channels, int peers, int rank, unsigned long part) {
  for (int i = 0; i < peers; ++i) channels[i].putWithSignal(rank * part, 0, part);
  for (int i = 0; i < peers; ++i) channels[i].wait();
}
extern "C" __global__ void put(Channels channels, unsigned long dst, unsigned long src, unsigned long bytes) {
  channels[0].putWithSignalAndFlush(dst, src, bytes);
  channels[0].wait();
}
extern "C" __global__ void put_only(Channels channels, unsigned long bytes) {
  channels[0].put(0, 0, bytes);
  channels[0].flush();
}
extern "C" __global__ void leave(Channels channels, unsigned long bytes) { channels[0].put(0, 0, bytes); }
extern "C" __global__ void wait(Channels channels) { channels[0].wait(); }
extern "C" __global__ void flood(Channels channels, int puts, unsigned long bytes) {
  for (int i = 0; i < puts; ++i) channels[0].put(i * bytes, i * bytes, bytes);
  channels[0].signal();
  channels[0].wait();
  channels[0].flush();
}
extern "C" __global__ void count(Channels channels, int turns, unsigned long* values, unsigned long* sent) {
  for (int i = 1; i <= turns; ++i) {
    sent[0] = i;
    __threadfence_system();
    channels[0].putWithSignalAndFlush(8 * turns, 0, 8);
    channels[0].wait();
    values[i - 1] = loadAcquireSystem(reinterpret_cast<uint64_t*>(values + turns));
  }
}
"""

if __name__ == "__main__":
    TESTS = Path(__file__).resolve().parent.parent.parent
    EXAMPLES = TESTS.parent / "examples"
    for directory in (*proxyccl.__path__, TESTS, EXAMPLES):
        compileall.compile_dir(directory, quiet=1)
    # pytest caches a rewritten module even if the module's import then fails because pyverbs is missing.
    collect = ["pytest", "--collect-only", "-p", "no:cacheprovider", str(TESTS / "rdma/soft_roce")]
    here = {**os.environ, "SOFT_ROCE_DEVICES": "none"}
    subprocess.run([sys.executable, "-m", *collect], env=here, stdout=subprocess.DEVNULL, check=False)
    sys.path[:0] = (str(EXAMPLES), str(TESTS))

    import gpu_data_interchange

    from support.cases import random_transfers

    runtime = HostRuntime()
    for source in (KERNELS, random_transfers.KERNEL, gpu_data_interchange.KERNEL):
        runtime.compile(source)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda kernel: runtime.shipped(*kernel), SHIPPED))
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(mode=0o700, parents=True)
    for compiled in {Path(path) for modules in runtime._modules.values() for path in modules}:
        shutil.copy(compiled, target)
