// Packets of MSCCL++'s LL protocol, with the layout of proxyccl's packets (proxyccl/packet.h).
#pragma once

#include "mscclpp/device.hpp"
#include "proxyccl/packet.h"

namespace mscclpp {

/// A packet of 16 bytes that carries 8 bytes of data.
union alignas(16) LL16Packet {
  struct {
    uint32_t data1, flag1, data2, flag2;
  };
  ulonglong2 raw_;

  using Payload = uint2;
  using Ours = proxyccl::LL16Packet;

  LL16Packet() = default;
  PROXYCCL_DEVICE LL16Packet(uint2 value, uint32_t flag) : data1(value.x), flag1(flag), data2(value.y), flag2(flag) {}

  /// Stores 8 bytes of data and the flag, which is neither 0 nor the packet's previous flag.
  PROXYCCL_DEVICE void write(uint32_t first, uint32_t second, uint32_t flag) {
    reinterpret_cast<Ours*>(this)->write({first, second}, flag);
  }
  PROXYCCL_DEVICE void write(uint64_t value, uint32_t flag) {
    write(static_cast<uint32_t>(value), static_cast<uint32_t>(value >> 32), flag);
  }
  PROXYCCL_DEVICE void write(uint2 value, uint32_t flag) { write(value.x, value.y, flag); }

  /// Loads the packet once.
  /// @return true if the packet does not have this flag yet, as in MSCCL++; otherwise `data` is its payload
  PROXYCCL_DEVICE bool readOnce(uint32_t flag, uint2& data) const {
    const Ours::Words words = ours()->load();
    const Ours::Payload payload = words.payload();
    data.x = payload.x;
    data.y = payload.y;
    return !words.carries(flag);
  }
  /// Waits for the packet with this flag.
  /// @return its data; zeros if the communicator has ended or the time-out passed
  PROXYCCL_DEVICE uint2 read(uint32_t flag, int64_t = -1) const {
    const auto payload = proxyccl::readPacket(ours(), flag);
    return make_uint2(payload.x, payload.y);
  }
  PROXYCCL_DEVICE void clear() { proxyccl::storePacket128(reinterpret_cast<uint64_t*>(this), 0, 0); }

 private:
  PROXYCCL_DEVICE const Ours* ours() const { return reinterpret_cast<const Ours*>(this); }
};

/// A packet of 8 bytes that carries 4 bytes of data.
union alignas(8) LL8Packet {
  struct {
    uint32_t data, flag;
  };
  uint64_t raw_;

  using Payload = uint32_t;
  using Ours = proxyccl::LL8Packet;

  LL8Packet() = default;
  PROXYCCL_DEVICE LL8Packet(uint32_t value, uint32_t flag_) : data(value), flag(flag_) {}

  /// Stores 4 bytes of data and the flag.
  PROXYCCL_DEVICE void write(uint32_t value, uint32_t flag_) { reinterpret_cast<Ours*>(this)->write(value, flag_); }
  PROXYCCL_DEVICE bool readOnce(uint32_t flag_, uint32_t& value) const {
    uint64_t seen;
    return !ours()->tryRead(flag_, &value, &seen);
  }
  PROXYCCL_DEVICE uint32_t read(uint32_t flag_, int64_t = -1) const { return proxyccl::readPacket(ours(), flag_); }
  PROXYCCL_DEVICE void clear() { proxyccl::storeRelaxedSystem<uint64_t>(reinterpret_cast<uint64_t*>(this), 0); }

 private:
  PROXYCCL_DEVICE const Ours* ours() const { return reinterpret_cast<const Ours*>(this); }
};

using LLPacket = LL16Packet;

template <class Packet>
using PacketPayload = typename Packet::Payload;

namespace detail {
// Returns whether `bytes` is a multiple of the packets' payload. If the result is false, a TriggerError ends the
// communicator that compiled the kernel.
template <class Packet>
PROXYCCL_DEVICE bool areWholePayloads(uint32_t call, uint64_t bytes) {
  constexpr uint64_t kUnit = sizeof(PacketPayload<Packet>);
  if (bytes % kUnit == 0) return true;
  proxyccl::recordError(nullptr, PROXYCCL_ERROR_OUT_OF_RANGE, {0, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL, kUnit}, 0,
                        {call, 0, bytes});
  return false;
}
}  // namespace detail

/// Writes data as packets, by a group of threads together: thread t writes packets t, t + numThreads, … .
/// @param target      where the packets go; they take twice `bytes`
/// @param origin      the data
/// @param bytes       a multiple of the payload's size; otherwise nothing is written, and the communicator that
///                    compiled the kernel ends with a TriggerError
/// @param threadId    the calling thread's number in the group
/// @param numThreads  threads in the group
/// @param flag not 0, and not the packets' previous flag
template <class Packet = LL16Packet>
PROXYCCL_DEVICE void copyToPackets(void* target, const void* origin, uint64_t bytes, uint32_t threadId,
                                   uint32_t numThreads, uint32_t flag) {
  if (!detail::areWholePayloads<Packet>(PROXYCCL_SM_COPY_TO_PACKETS, bytes)) return;
  Packet* packets = static_cast<Packet*>(target);
  const auto* payloads = static_cast<const PacketPayload<Packet>*>(origin);
  proxyccl::forEachInTurn(bytes / sizeof(PacketPayload<Packet>), threadId, numThreads,
                          [&](size_t i) { packets[i].write(payloads[i], flag); });
}

/// Waits for packets and writes their data; thread t handles packets t, t + numThreads, … . The parameters are those of
/// copyToPackets(), but the data's target comes before the packets' address.
template <class Packet = LL16Packet>
PROXYCCL_DEVICE void copyFromPackets(void* origin, const void* target, uint64_t bytes, uint32_t threadId,
                                     uint32_t numThreads, uint32_t flag, int64_t = -1) {
  if (!detail::areWholePayloads<Packet>(PROXYCCL_SM_COPY_FROM_PACKETS, bytes)) return;
  const Packet* packets = static_cast<const Packet*>(target);
  auto* payloads = static_cast<PacketPayload<Packet>*>(origin);
  proxyccl::forEachInTurn(bytes / sizeof(PacketPayload<Packet>), threadId, numThreads,
                          [&](size_t i) { payloads[i] = packets[i].read(flag); });
}

/// The older names of copyToPackets() and copyFromPackets(), with offsets in bytes.
template <class Packet = LL16Packet>
PROXYCCL_DEVICE void putPackets(void* target, uint64_t targetOffset, const void* origin, uint64_t originOffset,
                                uint64_t bytes, uint32_t threadId, uint32_t numThreads, uint32_t flag) {
  copyToPackets<Packet>(static_cast<char*>(target) + targetOffset, static_cast<const char*>(origin) + originOffset,
                        bytes, threadId, numThreads, flag);
}
template <class Packet = LL16Packet>
PROXYCCL_DEVICE void getPackets(const void* target, uint64_t targetOffset, void* origin, uint64_t originOffset,
                                uint64_t bytes, uint32_t threadId, uint32_t numThreads, uint32_t flag) {
  copyFromPackets<Packet>(static_cast<char*>(origin) + originOffset, static_cast<const char*>(target) + targetOffset,
                          bytes, threadId, numThreads, flag);
}

}  // namespace mscclpp
