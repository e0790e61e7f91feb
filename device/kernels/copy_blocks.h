// Copies a list of many short blocks of memory. A copy engine would take one to two microseconds for each block.
#pragma once

#include "proxyccl/copy.h"
#include "proxyccl/kernel.h"

namespace proxyccl {

struct BlockToCopy {
  uint64_t to, from, bytes;
};

}  // namespace proxyccl

// Each warp copies its own blocks of memory one after another. While a warp waits for its load of the list from host
// memory, other warps copy.
extern "C" __global__ void copy_blocks(const proxyccl::BlockToCopy* blocks, uint64_t count) {
  constexpr uint32_t kLanes = PROXYCCL_ON_HOST ? 1 : PROXYCCL_WARP_SIZE;
  const uint32_t warps = blockDim.x / kLanes, warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  for (uint64_t i = static_cast<uint64_t>(warp) * gridDim.x + blockIdx.x; i < count; i += warps * gridDim.x) {
    const proxyccl::BlockToCopy block = blocks[i];
    void* to = reinterpret_cast<void*>(block.to);
    const void* from = reinterpret_cast<const void*>(block.from);
#if PROXYCCL_ON_HOST
    proxyccl::copyBytes(to, from, block.bytes, lane, kLanes);
#else
    proxyccl::copyInTurn<16>(to, from, block.bytes, lane, kLanes);
#endif
  }
}
PROXYCCL_EXPORT_KERNEL(copy_blocks)
