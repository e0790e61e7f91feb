// Low-latency packets: one store carries data and a flag, so that the data needs no separate signal (NCCL's LL
// protocol).
//
// A reader waits until the packet's flags equal the flag that it expects. A flag must differ from the flag that the
// packet carried before. Flag 0 is refused, because zeroed memory holds 0.
#pragma once

#include "proxyccl/wait.h"

namespace proxyccl {

// A packet of 16 bytes with 8 bytes of data. Each half has its own flag, so a store that is torn in halves is harmless.
struct alignas(16) LL16Packet {
  uint32_t data1, flag1, data2, flag2;

  struct alignas(8) Payload {
    uint32_t x, y;
  };

  /// Stores data and flag, in one access.
  PROXYCCL_DEVICE void write(Payload payload, uint32_t flag) {
    const uint64_t tag = static_cast<uint64_t>(flag) << 32;
    storePacket128(reinterpret_cast<uint64_t*>(this), tag | payload.x, tag | payload.y);
  }
  /// Loads the packet once.
  /// @return whether the packet has this flag; if so, *payload is the packet's data. *seen is the packet's flag
  PROXYCCL_DEVICE bool tryRead(uint32_t flag, Payload* payload, uint64_t* seen) const {
    const Words words = load();
    *payload = words.payload();
    *seen = words.low >> 32;
    return words.carries(flag);
  }

  // Loads a packet without checking its flags, so that a thread can load several packets before it waits for one.
  struct Words {
    uint64_t low, high;

    PROXYCCL_DEVICE bool carries(uint32_t flag) const { return low >> 32 == flag && high >> 32 == flag; }
    PROXYCCL_DEVICE Payload payload() const { return {static_cast<uint32_t>(low), static_cast<uint32_t>(high)}; }
  };
  PROXYCCL_DEVICE Words load() const {
    Words words;
    loadPacket128(reinterpret_cast<const uint64_t*>(this), &words.low, &words.high);
    return words;
  }
};

// A packet of 8 bytes that carries 4 bytes of data.
struct alignas(8) LL8Packet {
  uint32_t data, flag;

  using Payload = uint32_t;

  /// Stores data and flag, in one access.
  PROXYCCL_DEVICE void write(Payload payload, uint32_t flag_) {
    storeRelaxedSystem(reinterpret_cast<uint64_t*>(this), static_cast<uint64_t>(flag_) << 32 | payload);
  }
  /// Loads the packet once.
  /// @return whether the packet has this flag; if so, *payload is the packet's data. *seen is the packet's flag
  PROXYCCL_DEVICE bool tryRead(uint32_t flag_, Payload* payload, uint64_t* seen) const {
    const uint64_t word = loadRelaxedSystem(reinterpret_cast<const uint64_t*>(this));
    *payload = static_cast<uint32_t>(word);
    *seen = word >> 32;
    return word >> 32 == flag_;
  }
};

using LLPacket = LL16Packet;

/// Waits for a packet with this flag. Any thread may call readPacket().
/// @param packet   the packet, in local memory
/// @param flag     the flag that the sender used
/// @param control  the communicator's control block; null for the module's
/// @param peer     the rank that sends the packet, for the error record if the packet does not arrive
/// @param channel  channel id, for the error record
/// @return the packet's data; zeros if the communicator has ended or the time-out passed
template <class Packet>
PROXYCCL_DEVICE typename Packet::Payload readPacket(const Packet* packet, uint32_t flag, Control* control = nullptr,
                                                    uint32_t peer = PROXYCCL_NO_PEER,
                                                    uint32_t channel = PROXYCCL_NO_CHANNEL) {
  typename Packet::Payload payload{};
  const WaitFor what = {PROXYCCL_WAIT_PACKET, peer, channel, flag};
  if (!waitUntil(control, what, [&](uint64_t* seen) { return packet->tryRead(flag, &payload, seen); })) return {};
  return payload;
}

/// Returns whether a flag is valid. Flag 0 is invalid: a wait for 0 would succeed too early, in zeroed memory.
///
/// An invalid flag ends the communicator with a TriggerError. The parameters are those of readPacket().
PROXYCCL_DEVICE bool flagIsValid(uint32_t flag, Control* control, uint32_t peer, uint32_t channel) {
  if (flag != 0) return true;
  recordError(control, PROXYCCL_ERROR_INVALID_FLAG, {PROXYCCL_WAIT_PACKET, peer, channel, 0}, 0);
  return false;
}

}  // namespace proxyccl
