// MemoryChannelDeviceHandle: proxyccl::SmChannelDeviceHandle with MSCCL++'s member names and signatures.
//
// The two types have the same layout, so a kernel's parameter of either type accepts a handle from
// `Communicator.sm_channels`.
#pragma once

#include "mscclpp/copy_device.hpp"
#include "mscclpp/semaphore_device.hpp"
#include "proxyccl/sm_channel.h"

namespace mscclpp {

namespace detail {

// The type of a wait's bound in MSCCL++. With int64_t, calls of overloads that also take a flag would be ambiguous.
template <class T>
struct SignedNumber;
template <>
struct SignedNumber<int> {
  using Type = void;
};
template <>
struct SignedNumber<long> {
  using Type = void;
};
template <>
struct SignedNumber<long long> {
  using Type = void;
};
struct SpinCount {
  SpinCount() = default;
  template <class Number, class = typename SignedNumber<Number>::Type>
  PROXYCCL_DEVICE SpinCount(Number) {}
};

}  // namespace detail

struct BaseMemoryChannelDeviceHandle {
  static constexpr uint32_t kHandleKind = PROXYCCL_HANDLE_SM_CHANNEL;

  MemoryDevice2DeviceSemaphoreDeviceHandle semaphore_;
  void* dst_;           // the peer's memory
  void* src_;           // local memory
  void* packetBuffer_;  // local memory that the peer's putPackets() fills
  ProxycclControl* control_;
  uint64_t dstBytes_, srcBytes_, packetBufferBytes_;
  uint32_t peer_, channel_;

  /// Adds one to the peer's semaphore. The peer then sees what the block wrote before a __syncthreads(); on AMD, before
  /// a proxyccl::syncThreadsSystem(). Any number of threads may call signal(), wait() and poll() concurrently.
  PROXYCCL_DEVICE void signal() const { ours().signal(); }
  /// Adds one to the peer's semaphore without ordering, for a signal that announces no data.
  PROXYCCL_DEVICE void relaxedSignal() const { ours().relaxedSignal(); }
  PROXYCCL_DEVICE void signalPacket() const { ours().relaxedSignal(); }
  /// Waits for the peer's next signal and consumes it.
  PROXYCCL_DEVICE void wait(int64_t = -1) const { ours().wait(); }
  PROXYCCL_DEVICE void relaxedWait(int64_t = -1) const { ours().relaxedWait(); }
  /// Consumes the peer's next signal if it has arrived.
  PROXYCCL_DEVICE bool poll() const { return ours().poll(); }

 protected:
  PROXYCCL_DEVICE proxyccl::SmChannelDeviceHandle ours() const {
    return __builtin_bit_cast(proxyccl::SmChannelDeviceHandle, *this);
  }
};

struct MemoryChannelDeviceHandle : BaseMemoryChannelDeviceHandle {
  MemoryChannelDeviceHandle() = default;
  /// Makes a channel from addresses. The channel's ranges are not checked, and errors do not name its peer.
  PROXYCCL_DEVICE MemoryChannelDeviceHandle(MemoryDevice2DeviceSemaphoreDeviceHandle semaphore, void* dst, void* src,
                                            void* packetBuffer)
      : BaseMemoryChannelDeviceHandle{semaphore, dst,   src,   packetBuffer,     nullptr,
                                      ~0ull,     ~0ull, ~0ull, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL} {}

  /// Reads one element of the peer's memory by a relaxed access.
  template <class T>
  PROXYCCL_DEVICE T read(uint64_t index) const {
    return handle().read<T>(index);
  }
  template <class T>
  PROXYCCL_DEVICE void write(uint64_t index, const T& value) const {
    handle().write<T>(index, value);
  }

  /// Copies between two addresses; see mscclpp::copy().
  template <int Alignment = 16, bool CopyRemainder = true>
  PROXYCCL_DEVICE void copy(void* to, const void* from, uint64_t bytes, uint32_t threadId, uint32_t numThreads) const {
    mscclpp::copy<Alignment, CopyRemainder>(to, from, bytes, threadId, numThreads);
  }

  /// Copies local memory (the origin) to the peer's (the target). A group of threads calls put() together. On every
  /// target, thread t copies the words t, t + numThreads, … of Alignment bytes each (proxyccl::copyInTurn()).
  template <int Alignment = 16, bool CopyRemainder = true>
  PROXYCCL_DEVICE void put(uint64_t targetOffset, uint64_t originOffset, uint64_t originBytes, uint32_t threadId,
                           uint32_t numThreads) const {
    handle().put<detail::wordOf(Alignment), CopyRemainder>(targetOffset, originOffset, originBytes, threadId,
                                                           numThreads);
  }
  template <int Alignment = 16, bool CopyRemainder = true>
  PROXYCCL_DEVICE void put(uint64_t offset, uint64_t originBytes, uint32_t threadId, uint32_t numThreads) const {
    handle().put<detail::wordOf(Alignment), CopyRemainder>(offset, originBytes, threadId, numThreads);
  }

  /// Copies the peer's memory (the origin) to local memory (the target). The target's offset comes first, as in MSCCL++
  /// since version 0.7.
  template <int Alignment = 16, bool CopyRemainder = true>
  PROXYCCL_DEVICE void get(uint64_t targetOffset, uint64_t originOffset, uint64_t originBytes, uint32_t threadId,
                           uint32_t numThreads) const {
    handle().get<detail::wordOf(Alignment), CopyRemainder>(targetOffset, originOffset, originBytes, threadId,
                                                           numThreads);
  }
  template <int Alignment = 16, bool CopyRemainder = true>
  PROXYCCL_DEVICE void get(uint64_t offset, uint64_t originBytes, uint32_t threadId, uint32_t numThreads) const {
    handle().get<detail::wordOf(Alignment), CopyRemainder>(offset, originBytes, threadId, numThreads);
  }

  /// Writes local memory as packets to the peer's memory.
  template <class Packet = LL16Packet>
  PROXYCCL_DEVICE void putPackets(uint64_t targetOffset, uint64_t originOffset, uint64_t originBytes, uint32_t threadId,
                                  uint32_t numThreads, uint32_t flag) const {
    handle().putPackets<PacketOf<Packet>>(targetOffset, originOffset, originBytes, threadId, numThreads, flag);
  }
  template <class Packet = LL16Packet>
  PROXYCCL_DEVICE void putPackets(uint64_t offset, uint64_t originBytes, uint32_t threadId, uint32_t numThreads,
                                  uint32_t flag) const {
    putPackets<Packet>(offset, offset, originBytes, threadId, numThreads, flag);
  }
  /// Waits for the packets in the packet buffer (the target) and writes their data to local memory (the origin).
  template <class Packet = LL16Packet>
  PROXYCCL_DEVICE void unpackPackets(uint64_t targetOffset, uint64_t originOffset, uint64_t originBytes,
                                     uint32_t threadId, uint32_t numThreads, uint32_t flag, int64_t = -1) const {
    handle().getPackets<PacketOf<Packet>>(targetOffset, originOffset, originBytes, threadId, numThreads, flag);
  }
  template <class Packet = LL16Packet>
  PROXYCCL_DEVICE void unpackPackets(uint64_t offset, uint64_t originBytes, uint32_t threadId, uint32_t numThreads,
                                     uint32_t flag, detail::SpinCount = {}) const {
    unpackPackets<Packet>(offset, offset, originBytes, threadId, numThreads, flag);
  }
  /// The older name of unpackPackets().
  template <class Packet = LL16Packet>
  PROXYCCL_DEVICE void getPackets(uint64_t targetOffset, uint64_t originOffset, uint64_t originBytes, uint32_t threadId,
                                  uint32_t numThreads, uint32_t flag) const {
    unpackPackets<Packet>(targetOffset, originOffset, originBytes, threadId, numThreads, flag);
  }
  /// Waits for one packet in the packet buffer.
  template <class Packet = LL16Packet>
  PROXYCCL_DEVICE PacketPayload<Packet> unpackPacket(uint64_t index, uint32_t flag, int64_t = -1) const {
    return static_cast<const Packet*>(packetBuffer_)[index].read(flag);
  }

 private:
  // Converts to the channel's own packet type, which has the same layout.
  template <class Packet>
  using PacketOf = typename Packet::Ours;

  PROXYCCL_DEVICE proxyccl::SmChannelDeviceHandle handle() const { return ours(); }
};

using SmChannelDeviceHandle = MemoryChannelDeviceHandle;

struct BaseMemoryChannel {
  using DeviceHandle = BaseMemoryChannelDeviceHandle;
};
struct MemoryChannel {
  using DeviceHandle = MemoryChannelDeviceHandle;
};
using SmChannel = MemoryChannel;

#ifdef __CUDACC_RTC__  // NVRTC of CUDA 13.0 has no __builtin_offsetof
#define MSCCLPP_OFFSET(type, member) __INTADDR__(&((type*)0)->member)
#else
#define MSCCLPP_OFFSET(type, member) __builtin_offsetof(type, member)
#endif
#define MSCCLPP_SAME_PLACE(theirs, ours)                                                                          \
  static_assert(MSCCLPP_OFFSET(BaseMemoryChannelDeviceHandle, theirs) == MSCCLPP_OFFSET(ProxycclSmChannel, ours), \
                "the layouts of MemoryChannelDeviceHandle and ProxycclSmChannel differ");
MSCCLPP_SAME_PLACE(semaphore_, semaphore)
MSCCLPP_SAME_PLACE(dst_, dst)
MSCCLPP_SAME_PLACE(src_, src)
MSCCLPP_SAME_PLACE(packetBuffer_, packet_buffer)
MSCCLPP_SAME_PLACE(control_, control)
MSCCLPP_SAME_PLACE(dstBytes_, dst_bytes)
MSCCLPP_SAME_PLACE(srcBytes_, src_bytes)
MSCCLPP_SAME_PLACE(packetBufferBytes_, packet_buffer_bytes)
MSCCLPP_SAME_PLACE(peer_, peer)
MSCCLPP_SAME_PLACE(channel_, channel)
#undef MSCCLPP_SAME_PLACE
#undef MSCCLPP_OFFSET
static_assert(sizeof(MemoryChannelDeviceHandle) == sizeof(ProxycclSmChannel), "the handles differ in size");

}  // namespace mscclpp
