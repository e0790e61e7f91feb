// Announcements that carry expert ids, four per packet.
#pragma once

#include "experts/announcement.h"

namespace proxyccl {

class IdAnnouncement : public Announcement {
 public:
  static constexpr uint32_t kBadExpert = 0xffff;  // replaces an id that is out of range

  using Announcement::Announcement;

  // Called by the block: sends the block's share of this rank's packets; the last thread sends the first packet. send()
  // needs only the kernel's arguments, so the packets leave as soon as the kernel starts.
  PROXYCCL_DEVICE void send(const ProxycclDispatch& call) const {
    const uint32_t all = packetsOfRank(), begin = all * blockIdx.x / e_.blocks;
    const uint32_t end = all * (blockIdx.x + 1) / e_.blocks;
    sendPackets(e_.peers, begin, end, blockDim.x - 1 - threadIdx.x, blockDim.x,
                [&](uint32_t packet) { return bitsOfPacket(call, packet); });
  }

  // Called by the block: waits for all ranks' packets. The block's threads may read the choices after the next barrier.
  // Returns false to a thread whose packets did not arrive.
  PROXYCCL_DEVICE bool await() const {
    return awaitAllBut(PROXYCCL_NO_PEER, threadIdx.x, blockDim.x,
                       [&](uint32_t source, uint32_t packet, uint64_t payload) {
                         *(packet == 0 ? &heads()[source] : &choicesOf(source)[packet - 1]) = payload;
                       });
  }

  // Calls body(source, slot, expert) for each slot of the ranks first to first + sources - 1, with the work divided
  // among `threads` calling threads. Slots beyond a rank's tokens have an id that drops the slot.
  template <class Body>
  PROXYCCL_DEVICE void forEachSlot(uint32_t first, uint32_t sources, uint32_t thread, uint32_t threads,
                                   Body body) const {
#pragma unroll 1
    for (uint32_t i = thread; i < sources * e_.choice_packets; i += threads) {
      const uint32_t source = first + i / e_.choice_packets, packet = i % e_.choice_packets;
      const uint64_t four = choicesOf(source)[packet];
#pragma unroll
      for (uint32_t k = 0; k < PROXYCCL_IDS_PER_PACKET; ++k)
        body(source, packet * PROXYCCL_IDS_PER_PACKET + k, idAt(four, k));
    }
  }

  PROXYCCL_DEVICE uint32_t expert(uint32_t source, uint32_t slot) const {
    return idAt(choicesOf(source)[slot / PROXYCCL_IDS_PER_PACKET], slot % PROXYCCL_IDS_PER_PACKET);
  }

 private:
  PROXYCCL_DEVICE uint64_t* choicesOf(uint32_t source) const { return behindHeads() + source * e_.choice_packets; }
  static PROXYCCL_DEVICE uint32_t idAt(uint64_t four, uint32_t k) { return four >> 16 * k & 0xffff; }

  PROXYCCL_DEVICE uint64_t bitsOfPacket(const ProxycclDispatch& call, uint32_t packet) const {
    if (packet == 0) return headOf(call);
    const uint32_t slots = call.tokens * e_.topk, experts = e_.world_size * e_.experts_per_rank;
    const Choices choices(e_, call);
    uint64_t bits = 0;
    if (packet >= front()) {
      const uint32_t bytes = e_.weight_bytes, each = sizeof(LL16Packet::Payload) / bytes;
      const uint32_t first = (packet - front()) * each;
#pragma unroll 1
      for (uint32_t k = 0; choices.areCarried() && k < each && first + k < slots; ++k)
        bits |= choices.carried(first + k) << 8 * bytes * k;
      return bits;
    }
    const uint32_t first = (packet - 1) * PROXYCCL_IDS_PER_PACKET;
#pragma unroll
    for (uint32_t k = 0; k < PROXYCCL_IDS_PER_PACKET; ++k) {
      const uint32_t id = first + k < slots ? static_cast<uint32_t>(choices.id(first + k)) : experts;
      bits |= static_cast<uint64_t>(id <= experts ? id : kBadExpert) << 16 * k;
    }
    return bits;
  }
};

}  // namespace proxyccl
