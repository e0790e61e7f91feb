// ProxyTrigger and FifoDeviceHandle. The trigger's layout is ours (proxyccl/trigger.h).
#ifndef MSCCLPP_FIFO_DEVICE_HPP_
#define MSCCLPP_FIFO_DEVICE_HPP_

#include "mscclpp/device.hpp"
#include "proxyccl/proxy_channel.h"

namespace mscclpp {

using TriggerType = uint64_t;
constexpr TriggerType TriggerData = PROXYCCL_OP_DATA;
constexpr TriggerType TriggerFlag = PROXYCCL_OP_SIGNAL;
constexpr TriggerType TriggerSync = PROXYCCL_OP_FLUSH;

using SemaphoreId = uint32_t;
using MemoryId = uint32_t;

struct alignas(16) ProxyTrigger {
  uint64_t fst, snd;

  ProxyTrigger() = default;
  PROXYCCL_DEVICE ProxyTrigger(uint64_t first, uint64_t second) : fst(first), snd(second) {}
  /// @param type        bits of TriggerData, TriggerFlag and TriggerSync
  /// @param dst         memory id of the destination
  /// @param dstOffset   in bytes
  /// @param src         memory id of the source
  /// @param srcOffset   in bytes
  /// @param bytes       number of bytes
  /// @param semaphoreId the channel's id: `channel` of its handle
  PROXYCCL_DEVICE ProxyTrigger(TriggerType type, MemoryId dst, uint64_t dstOffset, MemoryId src, uint64_t srcOffset,
                               uint64_t bytes, SemaphoreId semaphoreId) {
    const ProxycclTrigger trigger =
        proxyccl::makeTrigger(static_cast<uint32_t>(type), semaphoreId, dst, dstOffset, src, srcOffset, bytes);
    fst = trigger.word0;
    snd = trigger.word1;
  }
};

struct FifoDeviceHandle : proxyccl::Fifo {
  /// Pushes a trigger; waits while the ring is full.
  /// @return its place in the order of the ring, for sync(); ~0 if the communicator has ended
  PROXYCCL_DEVICE uint64_t push(ProxyTrigger trigger, int64_t = -1) const {
    return proxyccl::Fifo::push({trigger.fst, trigger.snd}, nullptr);
  }
  /// Waits until the proxy has taken a trigger out of the ring and issued it.
  PROXYCCL_DEVICE void sync(uint64_t place, int64_t = -1) const { proxyccl::Fifo::sync(place, nullptr); }
};

struct Fifo {
  using DeviceHandle = FifoDeviceHandle;
};

}  // namespace mscclpp

#endif
