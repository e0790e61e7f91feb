"""The device side compiles for NVIDIA, with the run-time compiler from PyPI; no GPU is needed.

What the compiler makes of the accesses that synchronise is read back from its PTX: widths, orders and scopes.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path

import pytest

from proxyccl.device.compile_cache import INCLUDE_DIR, KERNEL_DIR

CUBIN = "-arch=sm_90"
PTX = "-arch=compute_90"


class Nvrtc:
    """The few calls of libnvrtc that a compilation takes."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("nvidia")
        roots = spec.submodule_search_locations if spec is not None else None
        found = [path for root in roots or () for path in Path(root).glob("**/libnvrtc.so.*")]
        if not found:
            pytest.fail("libnvrtc is missing: pip install nvidia-cuda-nvrtc (it is part of the extra 'test')")
        self._lib = ctypes.CDLL(str(found[0]))

    def compile(self, source: str, arch: str) -> bytes:
        """The cubin (for -arch=sm_*) or the PTX (for -arch=compute_*). A warning fails the test as an error does."""
        program = ctypes.c_void_p()
        options = [f"-I{INCLUDE_DIR}", f"-I{KERNEL_DIR}", "-std=c++17", arch]
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        self._check(self._lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"source", 0, None, None))
        try:
            status = self._lib.nvrtcCompileProgram(program, len(options), encoded)
            log = self._fetch(program, "ProgramLog").rstrip(b"\0").decode().strip()
            assert (status, log) == (0, ""), log
            return self._fetch(program, "CUBIN" if arch.startswith("-arch=sm_") else "PTX")
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _fetch(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._lib, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._lib, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, status: int) -> None:
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        assert status == 0, self._lib.nvrtcGetErrorString(status)


@pytest.fixture(scope="session")
def nvrtc() -> Nvrtc:
    return Nvrtc()


def headers() -> list[str]:
    """Every shipped header but the other targets' platforms, as a source would include it."""
    public = [f"proxyccl/{path.name}" for path in (INCLUDE_DIR / "proxyccl").glob("*.h")]
    kernels = [path.name for path in KERNEL_DIR.glob("*.h")]
    return sorted({*public, *kernels} - {"proxyccl/platform_host.h", "proxyccl/platform_hip.h"})


def test_every_header_compiles_alone(nvrtc: Nvrtc) -> None:
    # Into PTX: templates and inline functions leave nothing for the assembler to do.
    for header in headers():
        nvrtc.compile(f'#include "{header}"\n', PTX)


# Every element type and every operation once, through all algorithms; the full product would take a minute.
REDUCTIONS = [
    ("float", "float32", "Sum"),
    ("double", "float64", "Prod"),
    ("int32_t", "int32", "Min"),
    ("int64_t", "int64", "Max"),
    ("proxyccl::Half", "float16", "Avg"),
    ("proxyccl::BFloat16", "bfloat16", "Sum"),
]
ALGORITHMS = (
    "all_reduce_one_shot",
    "all_reduce_recursive_doubling",
    "all_reduce_two_shot_packets",
    "all_reduce_two_shot",
    "all_reduce_ring",
    "reduce_scatter",
)


@pytest.mark.parametrize(("c_type", "dtype", "op"), REDUCTIONS, ids=[dtype for _, dtype, _ in REDUCTIONS])
def test_shipped_reductions_compile(nvrtc: Nvrtc, c_type: str, dtype: str, op: str) -> None:
    instances = f'#include "host_library.h"\nFOR_EACH_ALGORITHM({c_type}, {dtype}, {op}, {op.lower()})\n'
    cubin = nvrtc.compile(instances, CUBIN)
    for algorithm in ALGORITHMS:
        name = f"{algorithm}_{dtype}_{op.lower()}"
        assert f".text.{name}\0".encode() in cubin
        assert f"proxyccl_parameters_{name}\0".encode() in cubin


def shipped_without_dtype() -> list[Path]:
    return sorted(path for path in KERNEL_DIR.glob("*.h") if "PROXYCCL_EXPORT_KERNEL(" in path.read_text())


@pytest.mark.parametrize("path", shipped_without_dtype(), ids=lambda path: path.stem)
def test_shipped_kernels_without_a_dtype_compile(nvrtc: Nvrtc, path: Path) -> None:
    names = re.findall(r"^PROXYCCL_EXPORT_KERNEL\((\w+)\)$", path.read_text(), re.MULTILINE)
    cubin = nvrtc.compile(f'#include "{path.name}"\n', CUBIN)
    for name in names:
        assert f".text.{name}\0".encode() in cubin


@pytest.mark.parametrize("source", ["moves.h", "expert_dispatch.h", "host_library.h"])
def test_shipped_kernels_leave_registers_for_a_whole_block(nvrtc: Nvrtc, source: str) -> None:
    """A launch with more threads than a kernel's registers allow is refused, and no compile fails for it."""
    instances = "FOR_EACH_ALGORITHM(float, float32, Sum, sum)\n" if source == "host_library.h" else ""
    ptx = nvrtc.compile(f'#include "{source}"\n{instances}', PTX).decode()
    assert ptx.count(".visible .entry") == ptx.count(".maxntid 512") > 0


USER_KERNEL = r"""
#include "proxyccl/kernel.h"
#include "proxyccl/proxyccl.h"
using namespace proxyccl;

__device__ DeviceSyncer syncer;

extern "C" __global__ void sm_channel(DeviceHandle<SmChannel>* channels, uint32_t flag) {
  const DeviceHandle<SmChannel>& channel = channels[blockIdx.x];
  channel.put(16, 32, 4096, threadIdx.x, blockDim.x);
  channel.put(0, 4096, threadIdx.x, blockDim.x);
  channel.get(16, 32, 4096, threadIdx.x, blockDim.x);
  channel.get(0, 4096, threadIdx.x, blockDim.x);
  channel.putPackets(0, 0, 1024, threadIdx.x, blockDim.x, flag);
  channel.getPackets(0, 0, 1024, threadIdx.x, blockDim.x, flag);
  channel.putPackets<LL8Packet>(0, 0, 1024, threadIdx.x, blockDim.x, flag);
  channel.getPackets<LL8Packet>(0, 0, 1024, threadIdx.x, blockDim.x, flag);
  channel.write<float>(threadIdx.x, channel.read<float>(threadIdx.x) + 1);
  syncThreadsSystem();
  if (threadIdx.x == 0) {
    channel.signal();
    channel.relaxedSignal();
    channel.wait();
    while (!channel.poll()) spinHint(0);
  }
  syncer.sync(gridDim.x, channel.control);
}

extern "C" __global__ void proxy_channel(DeviceHandle<ProxyChannel> channel, uint32_t dst, uint32_t src) {
  if (threadIdx.x != 0) return;
  channel.put(0, 64);
  channel.put(64, 0, 64);
  channel.put(dst, 0, src, 64, 64);
  channel.signal();
  channel.putWithSignal(0, 64);
  channel.putWithSignal(64, 0, 64);
  channel.putWithSignal(dst, 0, src, 64, 64);
  channel.putWithSignalAndFlush(0, 64);
  channel.putWithSignalAndFlush(64, 0, 64);
  channel.flush();
  channel.wait();
  while (!channel.poll()) spinHint(0);
}

extern "C" __global__ void ring(Fifo fifo, ProxycclControl* control) {
  fifo.sync(fifo.push(makeTrigger(PROXYCCL_OP_CUSTOM, 1, 0, 0, 0, 0, 0), control), control);
}

extern "C" __global__ void block_and_warp(int* counters, float* sums, uint16_t* halves) {
  __shared__ float partial[32];
  float* dynamic = static_cast<float*>(dynamicShared());
  dynamic[threadIdx.x] = halfToFloat(halves[threadIdx.x]);
  partial[threadIdx.x / 32] = shuffle(dynamic[threadIdx.x], 0) + __shfl_xor_sync(0xffffffffu, 1.0f, 1);
  syncWarp();
  __syncthreads();
  atomicAdd(&counters[0], static_cast<int>(ballotWarp(threadIdx.x & 1)));
  atomicAdd_system(&counters[1], 1);
  atomicAdd(&sums[0], partial[0]);
  atomicMax(&counters[2], 7);
  atomicMin(&counters[3], 7);
  atomicExch(&counters[4], 7);
  atomicCAS(&counters[5], 7, 8);
  halves[threadIdx.x] = floatToHalf(dynamic[threadIdx.x]);
  fenceSystem();
}

PROXYCCL_EXPORT_KERNEL(sm_channel)
PROXYCCL_EXPORT_KERNEL(proxy_channel)
PROXYCCL_EXPORT_KERNEL(ring)
PROXYCCL_EXPORT_KERNEL(block_and_warp)
"""


@pytest.mark.parametrize("arch", [CUBIN, "-arch=sm_80"])
def test_a_kernel_that_uses_everything_compiles(nvrtc: Nvrtc, arch: str) -> None:
    cubin = nvrtc.compile(USER_KERNEL, arch)
    for name in ("sm_channel", "proxy_channel", "ring", "block_and_warp"):
        assert f".text.{name}\0".encode() in cubin


ACCESSES = r"""
#include "proxyccl/proxyccl.h"
using namespace proxyccl;
extern "C" {
__global__ void store_trigger(uint64_t* slot, uint64_t a, uint64_t b) {
  orderBeforeTrigger();
  storeTrigger(slot, a, b);
}
__global__ void write_ll16(LL16Packet* packet, uint32_t a, uint32_t b) { packet->write({a, b}, 1); }
__global__ void read_ll16(const LL16Packet* packet, uint64_t* out) {
  LL16Packet::Payload payload;
  uint64_t seen;
  if (packet->tryRead(1, &payload, &seen)) *out = payload.x + payload.y;
}
__global__ void write_ll8(LL8Packet* packet, uint32_t a) { packet->write(a, 1); }
__global__ void read_ll8(const LL8Packet* packet, uint64_t* out) {
  LL8Packet::Payload payload;
  uint64_t seen;
  if (packet->tryRead(1, &payload, &seen)) *out = payload;
}
__global__ void signal(Semaphore semaphore) { semaphore.signal(); }
__global__ void relaxed_signal(Semaphore semaphore) { semaphore.relaxedSignal(); }
__global__ void poll(Semaphore semaphore) { semaphore.poll(); }
__global__ void push(Fifo fifo, ProxycclTrigger trigger) { fifo.push(trigger, nullptr); }
__global__ void sync_ring(Fifo fifo) { fifo.sync(0, nullptr); }
__global__ void sync_grid(DeviceSyncer* syncer) { syncer->sync(gridDim.x); }
}
"""

# The accesses of each kernel above that carry an order or are volatile; plain ones (to a counter that one thread owns,
# to the result) are left out.
STRAIGHT = {
    # A fence, then one 16-byte store that nobody sees in part: a release, whose second word engine/ring.h acquires.
    "store_trigger": ["fence.acq_rel.sys", "st.relaxed.sys.global.b128"],
    # 16 bytes in one access, at system scope: PTX gives volatile the meaning of relaxed.sys.
    "write_ll16": ["st.volatile.global.v2.u64"],
    "read_ll16": ["ld.volatile.global.v2.u64"],
    "write_ll8": ["st.relaxed.sys.b64"],
    "read_ll8": ["ld.relaxed.sys.b64"],
    # The signal's release and the waiter's acquire, across the link.
    "signal": ["st.release.sys.b64"],
    "relaxed_signal": ["st.relaxed.sys.b64"],
    "poll": ["ld.acquire.sys.b64"],
}
# In a loop the compiler may repeat an access, so here it matters which there are, not how many.
LOOPS = {
    "push": {
        "atom.add.relaxed.gpu.u64",  # the ticket
        "ld.acquire.gpu.b64",  # room, as the cached tail tells
        "atom.exch.acquire.gpu.b32",  # the refresh lock …
        "ld.acquire.sys.b64",  # … the host's tail …
        "st.release.gpu.b64",  # … into the cache …
        "st.release.gpu.b32",  # … and the lock again
        "ld.relaxed.gpu.b64",  # the value that a time-out reports
        "fence.acq_rel.sys",  # the trigger's release …
        "st.relaxed.sys.global.b128",  # … and its store
    },
    "sync_ring": {"ld.acquire.sys.b64"},
    "sync_grid": {
        "ld.relaxed.gpu.b32",  # the generation to leave
        "atom.add.acq_rel.gpu.u32",  # arrival
        "st.relaxed.gpu.b32",  # the count, back to 0
        "st.release.gpu.b32",  # the next generation …
        "ld.acquire.gpu.b32",  # … and the wait for it
    },
}


def ordered_accesses(ptx: str, kernel: str) -> list[str]:
    """The opcodes of a kernel's accesses that carry an order or are volatile."""
    body = re.search(rf"\.entry {kernel}\(.*?^}}", ptx, re.DOTALL | re.MULTILINE)
    assert body is not None, kernel
    opcodes = re.findall(r"^\s*(?:@\S+\s+)?((?:ld|st|atom|red|fence)\.[\w.]+)", body[0], re.MULTILINE)
    orders = {"volatile", "relaxed", "acquire", "release", "acq_rel"}
    return [opcode for opcode in opcodes if orders & set(opcode.split("."))]


@pytest.fixture(scope="session")
def accesses_ptx(nvrtc: Nvrtc) -> str:
    return nvrtc.compile(ACCESSES, PTX).rstrip(b"\0").decode()


@pytest.mark.parametrize("kernel", STRAIGHT)
def test_an_access_is_one_instruction_of_the_right_width_order_and_scope(accesses_ptx: str, kernel: str) -> None:
    assert ordered_accesses(accesses_ptx, kernel) == STRAIGHT[kernel]


@pytest.mark.parametrize("kernel", LOOPS)
def test_waits_have_the_right_orders_and_scopes(accesses_ptx: str, kernel: str) -> None:
    assert set(ordered_accesses(accesses_ptx, kernel)) == LOOPS[kernel]
