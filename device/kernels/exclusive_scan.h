// An exclusive prefix sum.
#pragma once

#include "experts/expert_team.h"

namespace proxyccl {

// Called by one block: sets values[i] to the sum of values[0] to values[i - 1], plus added[i] if `added` is not null.
// Returns the sum of all values.
PROXYCCL_DEVICE uint32_t exclusiveScan(uint32_t* values, const uint32_t* added, uint32_t n) {
  __shared__ uint32_t sums[PROXYCCL_EXPERT_THREADS / PROXYCCL_WARP_SIZE];
  const uint32_t share = (n + blockDim.x - 1) / blockDim.x;
  const uint32_t begin = threadIdx.x * share < n ? threadIdx.x * share : n;
  const uint32_t end = begin + share < n ? begin + share : n;
  const uint32_t lane = threadIdx.x % PROXYCCL_WARP_SIZE, warp = threadIdx.x / PROXYCCL_WARP_SIZE;
  uint32_t own = 0;
#pragma unroll 1
  for (uint32_t i = begin; i < end; ++i) own += values[i];
  uint32_t through = own;
#pragma unroll
  for (uint32_t distance = 1; distance < PROXYCCL_WARP_SIZE; distance *= 2) {
    const uint32_t other = shuffle(through, lane >= distance ? lane - distance : lane);
    if (lane >= distance) through += other;
  }
  if (lane == PROXYCCL_WARP_SIZE - 1 || threadIdx.x == blockDim.x - 1) sums[warp] = through;
  __syncthreads();
  uint32_t before = through - own, total = 0;
#pragma unroll 1
  for (uint32_t w = 0; w * PROXYCCL_WARP_SIZE < blockDim.x; ++w) {
    if (w < warp) before += sums[w];
    total += sums[w];
  }
#pragma unroll 1
  for (uint32_t i = begin; i < end; ++i) {
    const uint32_t value = values[i];
    values[i] = before + (added != nullptr ? added[i] : 0);
    before += value;
  }
  __syncthreads();
  return total;
}

}  // namespace proxyccl
