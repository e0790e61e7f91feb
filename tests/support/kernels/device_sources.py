"""Sources that every device compiler must accept: the shipped kernels, and kernels that use every feature."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from proxyccl.device.arrays.dtypes import DTYPES, reduction_dtypes
from proxyccl.device.build.compile_cache import INCLUDE_DIR, KERNEL_DIR

# Each element type is compiled with one operation, for all algorithms, because all combinations would take minutes.
_OPERATIONS = {
    False: itertools.cycle(("Sum", "Prod", "Min", "Max")),
    True: itertools.cycle(("Avg", "Sum", "Band", "Bor", "Bxor")),
}
REDUCTIONS = [(dtype, next(_OPERATIONS[DTYPES[dtype].bitwise])) for dtype in reduction_dtypes()]
ALGORITHMS = (
    "all_reduce_one_shot",
    "all_reduce_recursive_doubling",
    "all_reduce_one_shot_lines",
    "all_reduce_two_shot_packets",
    "all_reduce_two_shot_lines",
    "all_reduce_two_shot",
    "all_reduce_ring",
    "reduce_scatter",
)


def reductions_of(dtype: str, op: str) -> str:
    """Returns a source with the kernels of all algorithms for an element type and an operation."""
    instances = f"FOR_EACH_ALGORITHM({DTYPES[dtype].c_name}, {dtype}, {op}, {op.lower()})\n"
    return f'#include "host_library.h"\n{DTYPES[dtype].c_check()}{instances}'


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

extern "C" __global__ void newer_names(DeviceHandle<MemoryChannel> memory, DeviceHandle<PortChannel> port) {
  const MemoryChannelDeviceHandle mapped = memory;
  const PortChannelDeviceHandle proxied = port;
  mapped.signal();
  proxied.signal();
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
PROXYCCL_EXPORT_KERNEL(newer_names)
PROXYCCL_EXPORT_KERNEL(proxy_channel)
PROXYCCL_EXPORT_KERNEL(ring)
PROXYCCL_EXPORT_KERNEL(block_and_warp)
"""

# Kernels that only preprocessing reveals, among code that only looks like kernels.
HIDDEN_KERNELS = r"""
#include "proxyccl/kernel.h"
#define NAMED(prefix, number) \
  extern "C" __global__ void __launch_bounds__(64) prefix##number(int* out) { *out = number; }
NAMED(plus_, 1)
#if 1
extern "C" __global__ void nothing() {}
#else
extern "C" __global__ void elsewhere() {}
#endif
template <class T> __global__ void no_kernel(T* out) { *out = 0; }
extern "C" __device__ __attribute__((noinline)) int no_kernel_either(int value) { return value * 3; }
extern "C" __global__ void calls(int* out) { *out = no_kernel_either(*out); }
__global__ void of_cpp(int* out) { *out = 1; }
"""

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
__global__ void add_signal(uint64_t* count) { addReleaseSystem(count, 1); }
__global__ void add_relaxed_signal(uint64_t* count) { addRelaxedSystem(count, 1); }
__global__ void poll(SharedSemaphore semaphore) { semaphore.poll(); }
__global__ void wait_until(SharedSemaphore semaphore) { semaphore.waitUntil(nullptr, 0, 0, 0, 7); }
__global__ void push(Fifo fifo, ProxycclTrigger trigger) { fifo.push(trigger, nullptr); }
__global__ void sync_ring(Fifo fifo) { fifo.sync(0, nullptr); }
__global__ void sync_grid(DeviceSyncer* syncer) { syncer->sync(gridDim.x); }
__global__ void read_int4(SmChannelDeviceHandle channel, int* out) {
  const int4 value = channel.read<int4>(1);
  *out = value.x + value.y + value.z + value.w;
}
__global__ void write_int4(SmChannelDeviceHandle channel, int value) {
  channel.write<int4>(1, make_int4(value, value, value, value));
}
__global__ void write_packet(SmChannelDeviceHandle channel) { channel.write<LL16Packet>(1, {1, 2, 3, 2}); }
struct Pair {
  float first, second;
};
__global__ void read_pair(SmChannelDeviceHandle channel, float* out) {
  const Pair pair = channel.read<Pair>(1);
  *out = pair.first + pair.second;
}
struct Colour {
  uint8_t red, green, blue;
};
__global__ void write_colour(SmChannelDeviceHandle channel) { channel.write<Colour>(1, {1, 2, 3}); }
}
"""


def symbol_of(kernel: str, code: str) -> str:
    """Returns the symbol of a shipped kernel in compiled code: the mangled name if the kernel is in a namespace, else
    the name.
    """
    mangled = re.search(rf"_ZN8proxyccl{len(kernel)}{kernel}E\w+", code)
    return mangled[0] if mangled else kernel


def shipped_without_dtype() -> list[Path]:
    return sorted(path for path in KERNEL_DIR.rglob("*.h") if "PROXYCCL_EXPORT_KERNEL(" in path.read_text())


def headers(target: str) -> list[str]:
    """Returns the include paths of all shipped headers for a target ("cuda", "hip"), except alternative names of
    MSCCL++'s headers and the files of `shipped_without_dtype`, which are compiled separately.
    """
    public = {f"{path.parent.name}/{path.name}" for path in INCLUDE_DIR.glob("*/*.h*")}
    kernels = {str(path.relative_to(KERNEL_DIR)) for path in KERNEL_DIR.rglob("*.h")}
    platforms = {name for name in public if name.startswith(("proxyccl/platform_", "proxyccl/host_", "host_only/"))}
    if target != "cuda":
        platforms |= {name for name in public if name.startswith(("proxyccl/cuda_", "cuda_names/"))}
    own = {f"proxyccl/platform_{target}.h"}
    other_names = {
        name for name in public if re.search(r"mscclpp/(?!device|gpu_data)(?!.*_device)|mscclpp/(sm|proxy|nvls)", name)
    }
    return sorted(
        (public - platforms - other_names | own | kernels)
        - {str(path.relative_to(KERNEL_DIR)) for path in shipped_without_dtype()}
    )
