// Device handles of semaphores between ranks: proxyccl::SharedSemaphore with MSCCL++'s member names.
//
// Any number of threads may call each method concurrently, except where the link to the peer does not support atomic
// additions (proxyccl::SharedSemaphore::signal()).
#pragma once

#include "mscclpp/atomic_device.hpp"
#include "mscclpp/poll_device.hpp"
#include "proxyccl/shared_semaphore.h"

namespace mscclpp {

namespace detail {

// The fields of ProxycclSemaphore under MSCCL++'s names.
struct Semaphore {
  uint64_t* inboundToken;          // number of the peer's signals that have arrived
  uint64_t* expectedInboundToken;  // in local memory: number of signals consumed or being waited for
  uint64_t* remoteInboundToken;    // the peer's inboundToken; null if the peer's proxy signals this semaphore
  uint64_t* outbound_;
  uint64_t adds_;

  /// Consumes the next signal if it has arrived.
  PROXYCCL_DEVICE bool poll() const { return ours().poll(); }
  /// Returns the number of signals that have arrived, by an acquire load, so the caller may read data that the peer
  /// wrote before these signals.
  PROXYCCL_DEVICE uint64_t loadInbound() const { return proxyccl::loadAcquireSystem(inboundToken); }
  /// Returns the number of signals consumed or being waited for.
  PROXYCCL_DEVICE uint64_t loadExpectedInbound() const { return proxyccl::loadRelaxedDevice(expectedInboundToken); }
  /// Reserves the next signal for the caller, who must wait for it, and returns its number.
  PROXYCCL_DEVICE uint64_t incExpectedInbound() const { return ours().takeNext(); }

 protected:
  PROXYCCL_DEVICE proxyccl::SharedSemaphore ours() const {
    return {{inboundToken, expectedInboundToken, remoteInboundToken, outbound_, adds_}};
  }
};
static_assert(sizeof(Semaphore) == sizeof(ProxycclSemaphore), "the semaphores differ in size");

}  // namespace detail

/// A semaphore that the peer's proxy signals. In Python: `proxy_channels(…).semaphores`.
struct Host2DeviceSemaphoreDeviceHandle : detail::Semaphore {
  static constexpr uint32_t kHandleKind = PROXYCCL_HANDLE_PROXY_SEMAPHORE;

  /// Waits for the next signal and consumes it.
  PROXYCCL_DEVICE void wait(int64_t = -1) const {
    ours().wait(nullptr, PROXYCCL_WAIT_PROXY_SIGNAL, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL);
  }
};

/// A semaphore that the peer's kernels signal. In Python: `sm_channels(…).semaphores`.
struct MemoryDevice2DeviceSemaphoreDeviceHandle : detail::Semaphore {
  static constexpr uint32_t kHandleKind = PROXYCCL_HANDLE_SM_SEMAPHORE;

  PROXYCCL_DEVICE void wait(int64_t = -1) const {
    ours().wait(nullptr, PROXYCCL_WAIT_SM_SIGNAL, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL);
  }
  /// Waits for the next signal without ordering, for a signal that announces no data.
  PROXYCCL_DEVICE void relaxedWait(int64_t = -1) const {
    ours().relaxedWait(nullptr, PROXYCCL_WAIT_SM_SIGNAL, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL);
  }
  /// Adds one to the peer's semaphore. A peer that has received the signal sees this thread's earlier writes.
  PROXYCCL_DEVICE void signal() const { ours().signal(); }
  /// Adds one to the peer's semaphore without ordering, for a signal that announces no data.
  PROXYCCL_DEVICE void relaxedSignal() const { ours().relaxedSignal(); }
  PROXYCCL_DEVICE uint64_t loadInboundRelaxed() const { return proxyccl::loadRelaxedSystem(inboundToken); }
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
