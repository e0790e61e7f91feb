// A barrier over the blocks of a grid, all of which must be resident.
#ifndef PROXYCCL_SYNC_H
#define PROXYCCL_SYNC_H

#include "proxyccl/wait.h"

namespace proxyccl {

// Zero-initialised memory, in device memory or as a __device__ global, is a ready barrier.
struct DeviceSyncer {
  uint32_t arrived;
  uint32_t generation;

  // Every thread of `blocks` blocks calls this. What any of them wrote before is visible to all of them after. Returns
  // false where the wait was given up. The number of blocks may change from one use to the next.
  PROXYCCL_DEVICE bool sync(int blocks, Control* control = nullptr) {
    syncThreadsDevice();
    bool met = true;
    if (threadIdx.x == 0 && blocks > 1) {
      const uint32_t now = loadRelaxedDevice(&generation);
      // Each arrival releases its block's writes; the last one acquires them all and passes them on with the
      // generation.
      if (fetchAddAcqRelDevice<uint32_t>(&arrived, 1) == static_cast<uint32_t>(blocks) - 1) {
        storeRelaxedDevice<uint32_t>(&arrived, 0);
        storeReleaseDevice<uint32_t>(&generation, now + 1);
      } else {
        const WaitFor what = {PROXYCCL_WAIT_GRID, PROXYCCL_NO_PEER, 0, static_cast<uint64_t>(now) + 1};
        met = waitUntil(control, what, [&](uint64_t* seen) { return (*seen = loadAcquireDevice(&generation)) != now; });
      }
    }
    __syncthreads();
    return met;
  }
};

}  // namespace proxyccl

#endif
