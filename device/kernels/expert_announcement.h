// The ranks of one node send each other the expert ids of few tokens as packets, which need no fence and no separate
// flag. Every block reads all packets and counts for itself, so no rank waits for another's counts.
//
// Packets of one parity, with the same layout on each rank: [ranks] heads, [ranks][id_packets] expert ids,
// [ranks][weight_packets] weights. Every announcement sends all of them, so announcement n + 2 overwrites announcement
// n. No flag guards that. Rank x announces n + 2 after it has ended dispatch n + 1, for which it needed every rank y's
// announcement n + 1, made after y had ended dispatch n.
#ifndef PROXYCCL_EXPERT_ANNOUNCEMENT_H
#define PROXYCCL_EXPERT_ANNOUNCEMENT_H

#include "expert_choices.h"

namespace proxyccl {

class Announcement {
 public:
  static constexpr uint32_t kBadExpert = 0xffff;  // stands for an id that is out of range

  // Announcements count from 1. A flag is the low 32 bits of the number. Fresh memory holds flag 0, so 1 << 31 stands
  // for it, which no announcement near by has.
  PROXYCCL_DEVICE Announcement(const ProxycclExperts& experts, uint64_t number)
      : e_(experts),
        flag_(static_cast<uint32_t>(number) != 0 ? static_cast<uint32_t>(number) : 1u << 31),
        offset_(experts.announced +
                number % 2 * experts.world_size * packetsOfRank() * static_cast<uint64_t>(sizeof(LL16Packet))) {}

  // Called by the block: sends its share of this rank's packets to every rank, itself included. The last threads send
  // first. It needs only the kernel's arguments, so the packets leave at once.
  PROXYCCL_DEVICE void send(const ProxycclDispatch& call) const {
    const uint32_t all = packetsOfRank(), begin = all * blockIdx.x / e_.blocks;
    const uint32_t share = all * (blockIdx.x + 1) / e_.blocks - begin;
#pragma unroll 1
    for (uint32_t i = blockDim.x - 1 - threadIdx.x; i < share * e_.local_size; i += blockDim.x) {
      const uint32_t packet = begin + i % share;
      packets(e_.peers[i / share])[placeOf(e_.rank, packet)].write(payload(call, packet), flag_);
    }
  }

  // Called by the block: waits for the heads and ids of all ranks. Threads may read them after the next barrier.
  // Returns false to a thread whose packets did not come.
  PROXYCCL_DEVICE bool awaitAnnouncements() const {
    const uint32_t ranks = e_.world_size, all = ranks * (1 + e_.id_packets);
    const LL16Packet* incoming = packets(e_.workspace);
    bool complete = true;
#pragma unroll 1
    for (uint32_t first = threadIdx.x; first < all; first += kAtOnce * blockDim.x) {
      LL16Packet::Words words[kAtOnce];
      WaitFor what = {PROXYCCL_WAIT_PACKET, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL, flag_};
      complete &= waitUntil(e_.control, what, [&](uint64_t* seen) {
        bool there = true;
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i)
          if (first + i * blockDim.x < all) words[i] = incoming[first + i * blockDim.x].load();
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
          const uint32_t packet = first + i * blockDim.x;
          if (packet >= all || words[i].carries(flag_)) continue;
          there = false;
          what.peer = packet < ranks ? packet : (packet - ranks) / e_.id_packets;
          *seen = words[i].low >> 32;
        }
        return there;
      });
      if (!complete) return false;
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        const uint32_t packet = first + i * blockDim.x;
        const LL16Packet::Payload payload = words[i].payload();
        if (packet < all) payloads()[packet] = static_cast<uint64_t>(payload.y) << 32 | payload.x;
      }
    }
    return true;
  }

  // Calls body(source, slot, expert) for each slot of `sources` ranks from `first` on, the work shared by `threads`
  // callers. Slots past a rank's tokens have the id that drops a slot.
  template <class Body>
  PROXYCCL_DEVICE void forEachSlot(uint32_t first, uint32_t sources, uint32_t thread, uint32_t threads,
                                   Body body) const {
#pragma unroll 1
    for (uint32_t i = thread; i < sources * e_.id_packets; i += threads) {
      const uint64_t four = ids()[first * e_.id_packets + i];
      const uint32_t source = first + i / e_.id_packets, slot = i % e_.id_packets * PROXYCCL_IDS_PER_PACKET;
#pragma unroll
      for (uint32_t k = 0; k < PROXYCCL_IDS_PER_PACKET; ++k) body(source, slot + k, idAt(four, k));
    }
  }

  // A packet of expert ids, as forEachSlot() takes them apart.
  PROXYCCL_DEVICE uint64_t idsOf(uint32_t source, uint32_t packet) const {
    return ids()[source * e_.id_packets + packet];
  }
  static PROXYCCL_DEVICE uint32_t idAt(uint64_t four, uint32_t k) { return four >> 16 * k & 0xffff; }
  PROXYCCL_DEVICE uint32_t tokens(uint32_t source) const { return payloads()[source] & 0xffff; }
  PROXYCCL_DEVICE uint32_t outputBuffer(uint32_t source) const { return payloads()[source] >> 16 & 0xffff; }
  PROXYCCL_DEVICE uint32_t wantedTokens(uint32_t source) const {
    return static_cast<uint32_t>(payloads()[source] >> 32);
  }
  PROXYCCL_DEVICE uint32_t expert(uint32_t source, uint32_t slot) const {
    return idAt(ids()[source * e_.id_packets + slot / PROXYCCL_IDS_PER_PACKET], slot % PROXYCCL_IDS_PER_PACKET);
  }

  // The weight of a slot. Waits until its packet has come.
  PROXYCCL_DEVICE uint64_t weight(uint32_t source, uint32_t slot) const {
    const uint32_t each = sizeof(LL16Packet::Payload) / e_.weight_bytes;
    const LL16Packet* packet = packets(e_.workspace) + placeOf(source, 1 + e_.id_packets + slot / each);
    const LL16Packet::Payload payload = readPacket(packet, flag_, e_.control, source);
    return (static_cast<uint64_t>(payload.y) << 32 | payload.x) >> slot % each * 8 * e_.weight_bytes;
  }

 private:
  static constexpr uint32_t kAtOnce = 4;  // loads of one thread in flight

  // The payloads of heads and ids.
  static PROXYCCL_DEVICE uint64_t* payloads() {
    __shared__ uint64_t words[PROXYCCL_MAX_EXPERT_RANKS + PROXYCCL_ANNOUNCED_SLOTS / PROXYCCL_IDS_PER_PACKET];
    return words;
  }
  PROXYCCL_DEVICE const uint64_t* ids() const { return payloads() + e_.world_size; }

  PROXYCCL_DEVICE uint32_t packetsOfRank() const { return 1 + e_.id_packets + e_.weight_packets; }
  PROXYCCL_DEVICE LL16Packet* packets(char* workspace) const {
    return reinterpret_cast<LL16Packet*>(workspace + offset_);
  }
  // The index of a rank's packet among the packets of all ranks.
  PROXYCCL_DEVICE uint32_t placeOf(uint32_t rank, uint32_t packet) const {
    const uint32_t ranks = e_.world_size;
    if (packet == 0) return rank;
    if (packet <= e_.id_packets) return ranks + rank * e_.id_packets + packet - 1;
    return ranks * (1 + e_.id_packets) + rank * e_.weight_packets + packet - 1 - e_.id_packets;
  }
  PROXYCCL_DEVICE LL16Packet::Payload payload(const ProxycclDispatch& call, uint32_t packet) const {
    if (packet == 0) return {call.tokens | call.output_buffer << 16, call.wanted_tokens};
    const uint32_t slots = call.tokens * e_.topk, experts = e_.world_size * e_.experts_per_rank;
    const Choices choices(e_, call);
    uint64_t bits = 0;
    if (packet <= e_.id_packets) {
      const uint32_t first = (packet - 1) * PROXYCCL_IDS_PER_PACKET;
#pragma unroll
      for (uint32_t k = 0; k < PROXYCCL_IDS_PER_PACKET; ++k) {
        const uint32_t id = first + k < slots ? static_cast<uint32_t>(choices.id(first + k)) : experts;
        bits |= static_cast<uint64_t>(id <= experts ? id : kBadExpert) << 16 * k;
      }
    } else if (choices.areCarried()) {
      const uint32_t bytes = e_.weight_bytes, each = sizeof(LL16Packet::Payload) / bytes;
      const uint32_t first = (packet - 1 - e_.id_packets) * each;
#pragma unroll 1
      for (uint32_t k = 0; k < each && first + k < slots; ++k) bits |= choices.carried(first + k) << 8 * bytes * k;
    }
    return {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
  }

  const ProxycclExperts& e_;
  const uint32_t flag_;
  const uint64_t offset_;
};

}  // namespace proxyccl

#endif
