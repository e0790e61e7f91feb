// A barrier and a semaphore between the blocks of a grid. All blocks that wait for each other must be resident.
#pragma once

#include "proxyccl/wait.h"

namespace proxyccl {

// Withdraws an arrival whose block has given up waiting, unless the barrier has completed in the meantime. Because each
// such block withdraws its arrival, no arrival remains when the kernel ends.
PROXYCCL_OUT_OF_LINE void withdrawArrival(uint32_t* arrived, const uint32_t* generation, uint32_t now) {
  uint32_t count = loadRelaxedDevice(arrived);
  while (count > 0 && loadRelaxedDevice(generation) == now && !compareExchangeDevice(arrived, count, count - 1))
    count = loadRelaxedDevice(arrived);
}

// A barrier over blocks; zero-initialised device memory, such as a __device__ global, is a valid one. After a kernel
// whose blocks gave up waiting, the barrier can be used again, even by another communicator.
struct DeviceSyncer {
  uint32_t arrived;
  uint32_t generation;

  /// Waits until all blocks have arrived; every thread calls it. All threads then see each other's earlier writes.
  /// @param blocks   number of blocks; it may differ from call to call
  /// @param control  the communicator's control block; null for the module's
  /// @return false to a block's thread 0 if the communicator has ended or the time-out passed; else true
  PROXYCCL_DEVICE bool sync(int blocks, Control* control = nullptr) {
    syncThreadsDevice();
    bool complete = true;
    if (threadIdx.x == 0 && blocks > 1) {
      const uint32_t now = loadRelaxedDevice(&generation);
      // Each arrival releases its block's writes. The last arrival acquires all blocks' writes, and its store of
      // `generation` releases them.
      if (fetchAddAcqRelDevice<uint32_t>(&arrived, 1) == static_cast<uint32_t>(blocks) - 1) {
        storeRelaxedDevice<uint32_t>(&arrived, 0);
        storeReleaseDevice<uint32_t>(&generation, now + 1);
      } else {
        const WaitFor what = {PROXYCCL_WAIT_GRID, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL,
                              static_cast<uint64_t>(now) + 1};
        complete =
            waitUntil(control, what, [&](uint64_t* seen) { return (*seen = loadAcquireDevice(&generation)) != now; });
        if (!complete) withdrawArrival(&arrived, &generation, now);
      }
    }
    __syncthreads();
    return complete;
  }
};

struct DeviceSemaphore {
  int32_t count;

  /// Adds one, and releases the block's writes before a syncThreadsDevice(). One thread of a block calls release().
  PROXYCCL_DEVICE void release() { fetchAddAcqRelDevice<int32_t>(&count, 1); }

  /// Waits until the count is positive, then subtracts one. One thread of a block calls acquire(). The block may then
  /// read what was written before the matching release().
  /// @param control  the communicator's control block; null for the module's
  /// @param what     describes the wait, for the error record
  /// @return false if the communicator has ended or the time-out passed; then the count is unchanged
  PROXYCCL_DEVICE bool acquire(Control* control = nullptr,
                               WaitFor what = {PROXYCCL_WAIT_GRID, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL, 1}) {
    return waitUntil(control, what, [&](uint64_t* seen) {
      const int32_t now = loadRelaxedDevice(&count);
      *seen = static_cast<uint64_t>(now);
      return now > 0 && compareExchangeSystem<int32_t>(&count, now, now - 1);
    });
  }

  /// Sets the count; no block may use the semaphore at the same time.
  PROXYCCL_DEVICE void set(int32_t value) { storeRelaxedDevice(&count, value); }
};

}  // namespace proxyccl
