// The device's side of semaphores between ranks. Both handles have the layout of proxyccl::Semaphore.
#ifndef MSCCLPP_SEMAPHORE_DEVICE_HPP_
#define MSCCLPP_SEMAPHORE_DEVICE_HPP_

#include "mscclpp/poll_device.hpp"
#include "proxyccl/semaphore.h"

namespace mscclpp {

/// Signalled by the peer's proxy.
struct Host2DeviceSemaphoreDeviceHandle : proxyccl::Semaphore {
  /// Consumes the next signal if it has arrived. One thread at a time calls it.
  PROXYCCL_DEVICE bool poll() const { return proxyccl::Semaphore::poll(); }
  /// Waits for the next signal and consumes it. One thread at a time calls it.
  PROXYCCL_DEVICE void wait(int64_t = -1) const {
    proxyccl::Semaphore::wait(nullptr, PROXYCCL_WAIT_PROXY_SIGNAL, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL);
  }
};

/// Signalled by the peer's kernels.
struct MemoryDevice2DeviceSemaphoreDeviceHandle : proxyccl::Semaphore {
  PROXYCCL_DEVICE bool poll() const { return proxyccl::Semaphore::poll(); }
  PROXYCCL_DEVICE void wait(int64_t = -1) const {
    proxyccl::Semaphore::wait(nullptr, PROXYCCL_WAIT_SM_SIGNAL, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL);
  }
  /// The same without ordering: for a signal that announces no data.
  PROXYCCL_DEVICE void relaxedWait(int64_t = -1) const {
    proxyccl::Semaphore::relaxedWait(nullptr, PROXYCCL_WAIT_SM_SIGNAL, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL);
  }
};

using SmDevice2DeviceSemaphoreDeviceHandle = MemoryDevice2DeviceSemaphoreDeviceHandle;

struct Host2DeviceSemaphore {
  using DeviceHandle = Host2DeviceSemaphoreDeviceHandle;
};
struct MemoryDevice2DeviceSemaphore {
  using DeviceHandle = MemoryDevice2DeviceSemaphoreDeviceHandle;
};
using SmDevice2DeviceSemaphore = MemoryDevice2DeviceSemaphore;

}  // namespace mscclpp

#endif
