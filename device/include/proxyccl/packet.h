// Low-latency packets: data and a flag in one store, so that data arriving is its own signal (NCCL's LL protocol).
//
// A reader waits until the flags equal its own; the flag must differ from the one that the same packet carried last,
// and 0, which fresh memory holds, is refused.
#ifndef PROXYCCL_PACKET_H
#define PROXYCCL_PACKET_H

#include "proxyccl/wait.h"

namespace proxyccl {

// 16 bytes that carry 8. Each 8-byte half has its own flag, so a store torn in halves does no harm.
struct alignas(16) LL16Packet {
  uint32_t data1, flag1, data2, flag2;

  struct alignas(8) Payload {
    uint32_t x, y;
  };

  PROXYCCL_DEVICE void write(Payload payload, uint32_t flag) {
    const uint64_t tag = static_cast<uint64_t>(flag) << 32;
    storePacket128(reinterpret_cast<uint64_t*>(this), tag | payload.x, tag | payload.y);
  }
  PROXYCCL_DEVICE bool tryRead(uint32_t flag, Payload* payload, uint64_t* seen) const {
    const Words words = load();
    *payload = words.payload();
    *seen = words.low >> 32;
    return words.carries(flag);
  }

  // A look at a packet, apart from its judgement: a thread may look at several before it waits for the first.
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

// 8 bytes that carry 4.
struct alignas(8) LL8Packet {
  uint32_t data, flag;

  using Payload = uint32_t;

  PROXYCCL_DEVICE void write(Payload payload, uint32_t flag_) {
    storeRelaxedSystem(reinterpret_cast<uint64_t*>(this), static_cast<uint64_t>(flag_) << 32 | payload);
  }
  PROXYCCL_DEVICE bool tryRead(uint32_t flag_, Payload* payload, uint64_t* seen) const {
    const uint64_t word = loadRelaxedSystem(reinterpret_cast<const uint64_t*>(this));
    *payload = static_cast<uint32_t>(word);
    *seen = word >> 32;
    return word >> 32 == flag_;
  }
};

using LLPacket = LL16Packet;

// Waits for a packet with this flag. Zeroes when the wait failed.
template <class Packet>
PROXYCCL_DEVICE typename Packet::Payload readPacket(const Packet* packet, uint32_t flag, Control* control,
                                                    uint32_t peer, uint32_t channel = 0) {
  typename Packet::Payload payload{};
  const WaitFor what = {PROXYCCL_WAIT_PACKET, peer, channel, flag};
  if (!waitUntil(control, what, [&](uint64_t* seen) { return packet->tryRead(flag, &payload, seen); })) return {};
  return payload;
}

// Fresh memory holds flag 0, so a wait for 0 would "succeed" before anything arrived.
PROXYCCL_DEVICE bool flagIsValid(uint32_t flag, Control* control, uint32_t peer, uint32_t channel) {
  if (flag != 0) return true;
  reportError(control, PROXYCCL_ERROR_INVALID_FLAG, {PROXYCCL_WAIT_PACKET, peer, channel, 0}, 0);
  return false;
}

}  // namespace proxyccl

#endif
