// DeviceSyncer and DeviceSemaphore: barriers and semaphores between the blocks of a grid.
#pragma once

#include "mscclpp/atomic_device.hpp"
#include "mscclpp/poll_device.hpp"
#include "proxyccl/sync.h"

namespace mscclpp {

/// A barrier over blocks; zero-initialised device memory is a valid one.
struct DeviceSyncer : proxyccl::DeviceSyncer {
  /// Waits until all blocks have arrived; every thread calls it. All threads then see each other's earlier writes.
  PROXYCCL_DEVICE void sync(int blocks, int64_t = -1) { proxyccl::DeviceSyncer::sync(blocks); }
};

/// A counting semaphore between blocks: proxyccl::DeviceSemaphore with MSCCL++'s signatures.
struct DeviceSemaphore : proxyccl::DeviceSemaphore {
  DeviceSemaphore() = default;
  MSCCLPP_HOST_DEVICE_INLINE DeviceSemaphore(int initial) : proxyccl::DeviceSemaphore{initial} {}

  /// Waits until the count is positive, then subtracts one. One thread of a block calls acquire().
  PROXYCCL_DEVICE void acquire(int64_t = -1) { proxyccl::DeviceSemaphore::acquire(); }
};

}  // namespace mscclpp
