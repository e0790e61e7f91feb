// ProxyTrigger and FifoDeviceHandle. The trigger's layout (proxyccl/trigger.h) is that of MSCCL++, except that one bit
// of the size marks a get, so a transfer has at most 2 GiB.
#pragma once

#include "mscclpp/atomic_device.hpp"
#include "mscclpp/poll_device.hpp"
#include "proxyccl/proxy_channel.h"

namespace mscclpp {

using TriggerType = uint64_t;
constexpr TriggerType TriggerData = PROXYCCL_OP_DATA;
constexpr TriggerType TriggerFlag = PROXYCCL_OP_SIGNAL;
constexpr TriggerType TriggerSync = PROXYCCL_OP_FLUSH;

constexpr unsigned int TriggerBitsSize = PROXYCCL_GET_SHIFT + 1;
constexpr unsigned int TriggerBitsOffset = PROXYCCL_OFFSET_BITS;
constexpr unsigned int TriggerBitsMemoryId = PROXYCCL_MEMORY_BITS;
constexpr unsigned int TriggerBitsType = PROXYCCL_OP_BITS;
constexpr unsigned int TriggerBitsSemaphoreId = PROXYCCL_CHANNEL_BITS;
constexpr unsigned int TriggerBitsFifoReserved = 1;

using SemaphoreId = uint32_t;
using MemoryId = uint32_t;

union alignas(16) ProxyTrigger {
  struct {
    uint64_t fst, snd;
  };
  /// The upper bit of `size` marks a get; `reserved` holds the ring's parity bit.
  struct {
    uint64_t size : TriggerBitsSize;
    uint64_t srcOffset : TriggerBitsOffset;
    uint64_t dstOffset : TriggerBitsOffset;
    uint64_t srcMemoryId : TriggerBitsMemoryId;
    uint64_t dstMemoryId : TriggerBitsMemoryId;
    uint64_t type : TriggerBitsType;
    uint64_t semaphoreId : TriggerBitsSemaphoreId;
    uint64_t reserved : TriggerBitsFifoReserved;
  } fields;

  ProxyTrigger() = default;
  PROXYCCL_DEVICE ProxyTrigger(uint64_t first, uint64_t second) : fst(first), snd(second) {}
  /// @param type        bits of TriggerData, TriggerFlag and TriggerSync
  /// @param dst         memory id of the destination
  /// @param dstOffset   in bytes
  /// @param src         memory id of the source
  /// @param srcOffset   in bytes
  /// @param bytes       number of bytes
  /// @param semaphoreId the channel's id: `semaphoreId_` of the channel's handle
  PROXYCCL_DEVICE ProxyTrigger(TriggerType type, MemoryId dst, uint64_t dstOffset, MemoryId src, uint64_t srcOffset,
                               uint64_t bytes, SemaphoreId semaphoreId) {
    const ProxycclTrigger trigger =
        proxyccl::makeTrigger(static_cast<uint32_t>(type), semaphoreId, dst, dstOffset, src, srcOffset, bytes);
    fst = trigger.word0;
    snd = trigger.word1;
  }
};
static_assert(sizeof(ProxyTrigger) == sizeof(ProxycclTrigger), "the triggers differ in size");

/// The fields of ProxycclFifo under MSCCL++'s names. In Python: `proxy_channels(…).fifo`.
struct FifoDeviceHandle {
  static constexpr uint32_t kHandleKind = PROXYCCL_HANDLE_FIFO;

  ProxyTrigger* triggers;  // in host memory
  uint64_t* tail;          // in host memory: the number of triggers that the proxy has taken
  uint64_t* head;          // number of triggers pushed
  uint64_t* tailCache;     // the producers' copy of `tail`
  uint32_t* refreshLock_;
  uint32_t sizeShift;
  int size;  // slots of the ring: 1 << sizeShift
  uint64_t sizeMask;

  /// Pushes a trigger; waits while the ring is full. Any number of threads may call push() concurrently.
  /// @return the number of triggers pushed before this one, for poll() and sync(); ~0 if the communicator has ended
  PROXYCCL_DEVICE uint64_t push(ProxyTrigger trigger, int64_t = -1) const {
    return ours().push({trigger.fst, trigger.snd}, nullptr);
  }
  /// Returns whether the proxy has taken the trigger for which push() returned `place` out of the ring and issued it.
  PROXYCCL_DEVICE bool poll(uint64_t place) const {
    if (proxyccl::loadAcquireSystem(tail) > place) return true;
    proxyccl::spinHint(0);  // on the host, lets the block's other threads run
    return false;
  }
  /// Waits until poll(place) returns true.
  PROXYCCL_DEVICE void sync(uint64_t place, int64_t = -1) const { ours().sync(place, nullptr); }

 private:
  PROXYCCL_DEVICE proxyccl::Fifo ours() const { return __builtin_bit_cast(proxyccl::Fifo, *this); }
};
static_assert(sizeof(FifoDeviceHandle) == sizeof(ProxycclFifo), "the handles differ in size");

struct Fifo {
  using DeviceHandle = FifoDeviceHandle;
};

}  // namespace mscclpp
