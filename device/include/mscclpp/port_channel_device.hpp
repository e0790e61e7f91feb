// PortChannelDeviceHandle: proxyccl::ProxyChannelDeviceHandle with MSCCL++'s member names and signatures.
//
// The two types have the same layout, so a kernel's parameter of either type accepts a handle from
// `Communicator.proxy_channels`. A semaphore's id equals its channel's id, because both are numbered from 0 in each
// proxy.
#pragma once

#include "mscclpp/fifo_device.hpp"
#include "mscclpp/semaphore_device.hpp"

namespace mscclpp {

/// A channel whose put() and get() take memory ids, because it has no default memories.
struct BasePortChannelDeviceHandle {
  static constexpr uint32_t kHandleKind = PROXYCCL_HANDLE_PROXY_CHANNEL;

  FifoDeviceHandle fifo_;
  Host2DeviceSemaphoreDeviceHandle semaphore_;
  uint64_t* flushDonePos_;  // ring index of the channel's last complete flush, plus one; 0 if none
  uint64_t* completed_;
  const uint64_t* memoryLimits_;
  ProxycclControl* control_;
  SemaphoreId semaphoreId_;
  uint32_t peer_;
  MemoryId dst_, src_;  // the fixed memories of a PortChannel

  /// Starts a copy from local memory to the peer's. One thread calls put().
  /// @param dstId      the peer's memory: in Python RegisteredMemory.peer_id(peer)
  /// @param dstOffset  in bytes
  /// @param srcId      local memory: in Python RegisteredMemory.source_id(peer)
  /// @param srcOffset  in bytes
  /// @param size       number of bytes
  PROXYCCL_DEVICE void put(MemoryId dstId, uint64_t dstOffset, MemoryId srcId, uint64_t srcOffset,
                           uint64_t size) const {
    ours().put(dstId, dstOffset, srcId, srcOffset, size);
  }
  PROXYCCL_DEVICE void put(MemoryId dstId, MemoryId srcId, uint64_t offset, uint64_t size) const {
    put(dstId, offset, srcId, offset, size);
  }
  /// Adds one to the peer's semaphore; the signal arrives after the data of all earlier puts on the channel.
  PROXYCCL_DEVICE void signal() const { ours().signal(); }
  PROXYCCL_DEVICE void putWithSignal(MemoryId dstId, uint64_t dstOffset, MemoryId srcId, uint64_t srcOffset,
                                     uint64_t size) const {
    ours().putWithSignal(dstId, dstOffset, srcId, srcOffset, size);
  }
  PROXYCCL_DEVICE void putWithSignal(MemoryId dstId, MemoryId srcId, uint64_t offset, uint64_t size) const {
    putWithSignal(dstId, offset, srcId, offset, size);
  }
  PROXYCCL_DEVICE void putWithSignalAndFlush(MemoryId dstId, uint64_t dstOffset, MemoryId srcId, uint64_t srcOffset,
                                             uint64_t size, int64_t = -1) const {
    ours().putWithSignal(dstId, dstOffset, srcId, srcOffset, size);
    ours().flush();
  }
  PROXYCCL_DEVICE void putWithSignalAndFlush(MemoryId dstId, MemoryId srcId, uint64_t offset, uint64_t size,
                                             int64_t = -1) const {
    putWithSignalAndFlush(dstId, offset, srcId, offset, size);
  }
  /// Waits until all earlier operations on the channel are complete.
  PROXYCCL_DEVICE void flush(int64_t = -1) const { ours().flush(); }
  /// Consumes the peer's next signal if it has arrived.
  PROXYCCL_DEVICE bool poll() const { return ours().poll(); }
  /// Waits for the peer's next signal and consumes it. Any number of threads may call wait() concurrently.
  PROXYCCL_DEVICE void wait(int64_t = -1) const { ours().wait(); }

  /// Returns the same channel with ProxyCCL's methods, some of which MSCCL++ lacks: get(), putValue(), signal(value),
  /// waitUntil(), flushAsync(), and puts that return tickets.
  PROXYCCL_DEVICE proxyccl::ProxyChannelDeviceHandle ours() const {
    return __builtin_bit_cast(proxyccl::ProxyChannelDeviceHandle, *this);
  }

  /// Not supported, because neither copy engines nor the fabric can add atomically.
  template <class Value>
  PROXYCCL_DEVICE void atomicAdd(MemoryId, uint64_t, Value) const {
    static_assert(sizeof(Value) == 0, "PortChannel::atomicAdd is not offered: no transport adds atomically");
  }
};

/// A channel between two memories, which its constructor fixes.
struct PortChannelDeviceHandle : BasePortChannelDeviceHandle {
  PROXYCCL_DEVICE void put(uint64_t dstOffset, uint64_t srcOffset, uint64_t size) const {
    ours().put(dstOffset, srcOffset, size);
  }
  PROXYCCL_DEVICE void put(uint64_t offset, uint64_t size) const { ours().put(offset, size); }
  PROXYCCL_DEVICE void putWithSignal(uint64_t dstOffset, uint64_t srcOffset, uint64_t size) const {
    ours().putWithSignal(dstOffset, srcOffset, size);
  }
  PROXYCCL_DEVICE void putWithSignal(uint64_t offset, uint64_t size) const { ours().putWithSignal(offset, size); }
  PROXYCCL_DEVICE void putWithSignalAndFlush(uint64_t dstOffset, uint64_t srcOffset, uint64_t size,
                                             int64_t = -1) const {
    ours().putWithSignalAndFlush(dstOffset, srcOffset, size);
  }
  PROXYCCL_DEVICE void putWithSignalAndFlush(uint64_t offset, uint64_t size) const {
    ours().putWithSignalAndFlush(offset, size);
  }
  /// Copies the peer's memory to local memory; the offset of local memory comes first. MSCCL++ has no get().
  PROXYCCL_DEVICE void get(uint64_t dstOffset, uint64_t srcOffset, uint64_t size) const {
    ours().get(dstOffset, srcOffset, size);
  }
  PROXYCCL_DEVICE void get(uint64_t offset, uint64_t size) const { ours().get(offset, size); }
  /// Not supported, because neither copy engines nor the fabric can add atomically.
  template <class Value>
  PROXYCCL_DEVICE void atomicAdd(uint64_t, Value) const {
    static_assert(sizeof(Value) == 0, "PortChannel::atomicAdd is not offered: no transport adds atomically");
  }
};

using BaseProxyChannelDeviceHandle = BasePortChannelDeviceHandle;
using ProxyChannelDeviceHandle = PortChannelDeviceHandle;

struct BasePortChannel {
  using DeviceHandle = BasePortChannelDeviceHandle;
};
struct PortChannel {
  using DeviceHandle = PortChannelDeviceHandle;
};
using BaseProxyChannel = BasePortChannel;
using ProxyChannel = PortChannel;

namespace detail {
/// Waits until the flush with this index in the ring is complete.
PROXYCCL_DEVICE void waitFlush(uint64_t* flushDonePos, uint64_t place, int64_t = -1) {
  const proxyccl::WaitFor what = {PROXYCCL_WAIT_FLUSH, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL, place + 1};
  proxyccl::waitUntil(nullptr, what,
                      [&](uint64_t* seen) { return (*seen = proxyccl::loadAcquireSystem(flushDonePos)) > place; });
}
}  // namespace detail

static_assert(sizeof(PortChannelDeviceHandle) == sizeof(ProxycclProxyChannel), "the handles differ in size");

}  // namespace mscclpp
