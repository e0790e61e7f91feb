// In a dispatch of few tokens, the ranks of a node send each other their choices of experts as packets (an
// announcement), which need neither a fence nor a separate flag. Every block reads all packets and counts the choices
// itself, so no rank waits for another rank's counts. Choices are ids (experts/announcement_ids.h) or masks
// (experts/announcement_masks.h).
//
// Even and odd announcements have separate packets, with this layout on each rank: [ranks][1 + choice_packets] a head
// and choices, [ranks][weight_packets] weights. Every announcement sends all packets of its parity, so announcement n +
// 2 overwrites announcement n. No flag is needed to protect announcement n. A rank makes announcement n + 2 only after
// it has ended dispatch n + 1, which needs announcement n + 1 of every rank. Every rank makes announcement n + 1 only
// after it has ended dispatch n.
#pragma once

#include "experts/choices.h"

namespace proxyccl {

class Announcement {
 public:
  // Announcements are numbered from 1. The flag of a packet is the low 32 bits of its announcement's number. If these
  // bits are 0, the flag is 1 << 31 instead, because zeroed memory holds 0. The nearest other announcement with flag 1
  // << 31 is 2^31 announcements away.
  PROXYCCL_DEVICE Announcement(const ProxycclExperts& experts, uint64_t number)
      : e_(experts),
        flag_(static_cast<uint32_t>(number) != 0 ? static_cast<uint32_t>(number) : 1u << 31),
        offset_(experts.announced +
                number % 2 * experts.world_size * packetsOfRank() * static_cast<uint64_t>(sizeof(LL16Packet))) {}

  PROXYCCL_DEVICE uint32_t tokens(uint32_t source) const { return heads()[source] & 0xffff; }
  PROXYCCL_DEVICE uint32_t outputBuffer(uint32_t source) const { return heads()[source] >> 16 & 0xffff; }
  PROXYCCL_DEVICE uint32_t wantedTokens(uint32_t source) const { return static_cast<uint32_t>(heads()[source] >> 32); }

  // Waits for the packet that carries a slot's weight or ProxycclExpertChoice, and returns this value.
  PROXYCCL_DEVICE uint64_t carried(uint32_t source, uint32_t slot) const {
    const uint32_t each = sizeof(LL16Packet::Payload) / e_.weight_bytes;
    return awaitPacket(source, front() + slot / each) >> slot % each * 8 * e_.weight_bytes;
  }

 protected:
  // Returns the number of a rank's front packets, which precede its weights: a head and the choices.
  PROXYCCL_DEVICE uint32_t front() const { return 1 + e_.choice_packets; }
  PROXYCCL_DEVICE uint32_t packetsOfRank() const { return front() + e_.weight_packets; }
  // The block's copy of the payloads of all ranks' front packets: the heads, then the choices.
  static PROXYCCL_DEVICE uint64_t* heads() {
    __shared__ uint64_t words[PROXYCCL_ANNOUNCED_PAYLOADS];
    return words;
  }
  PROXYCCL_DEVICE uint64_t* behindHeads() const { return heads() + e_.world_size; }

  static PROXYCCL_DEVICE uint64_t bitsOf(LL16Packet::Payload payload) {
    return static_cast<uint64_t>(payload.y) << 32 | payload.x;
  }
  static PROXYCCL_DEVICE uint64_t headOf(const ProxycclDispatch& call) {
    return bitsOf({call.tokens | call.output_buffer << 16, call.wanted_tokens});
  }

  // Sends a packet of this rank to every rank, itself included. `peers` are the ranks' workspaces.
  PROXYCCL_DEVICE void sendPacket(char* const* peers, uint32_t packet, uint64_t bits) const {
    const uint32_t place = placeOf(e_.rank, packet);
#pragma unroll 1
    for (uint32_t local = 0; local < e_.local_size; ++local)
      packets(peers[local])[place].write({static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)}, flag_);
  }
  template <class BitsOf>
  PROXYCCL_DEVICE void sendPackets(char* const* peers, uint32_t begin, uint32_t end, uint32_t thread, uint32_t threads,
                                   BitsOf bitsOfPacket) const {
#pragma unroll 1
    for (uint32_t packet = begin + thread; packet < end; packet += threads)
      sendPacket(peers, packet, bitsOfPacket(packet));
  }
  PROXYCCL_DEVICE uint64_t awaitPacket(uint32_t source, uint32_t packet) const {
    return bitsOf(readPacket(packets(e_.workspace) + placeOf(source, packet), flag_, e_.control, source));
  }
  PROXYCCL_DEVICE const LL16Packet& packetOfSlot(uint32_t source, uint32_t slot) const {
    return packets(e_.workspace)[placeOf(source, front() + slot)];
  }
  // Called by `threads` threads: waits for the front packets of all ranks except `known`, and calls keep(source,
  // packet, payload) for each packet. Returns false to a thread whose packets did not arrive.
  template <class Keep>
  PROXYCCL_DEVICE bool awaitAllBut(uint32_t known, uint32_t thread, uint32_t threads, Keep keep) const {
    // A loop over single packets has less code to fetch into the instruction cache than a loop over four, which saves 1
    // us in a dispatch of 128 tokens.
    if (packetsBut(known) <= threads) return awaitEach<1>(known, thread, threads, keep);
    return awaitEach<4>(known, thread, threads, keep);
  }

  const ProxycclExperts& e_;
  const uint32_t flag_;

 private:
  // Return the number of front packets of all ranks but `known`, and the index of the i-th of these packets.
  PROXYCCL_DEVICE uint32_t packetsBut(uint32_t known) const {
    return (e_.world_size - (known < e_.world_size ? 1 : 0)) * front();
  }
  PROXYCCL_DEVICE uint32_t placeBut(uint32_t known, uint32_t i) const { return i / front() < known ? i : i + front(); }
  template <uint32_t kAtOnce, class Keep>
  PROXYCCL_DEVICE bool awaitEach(uint32_t known, uint32_t thread, uint32_t threads, Keep keep) const {
    const uint32_t all = packetsBut(known);
    const LL16Packet* incoming = packets(e_.workspace);
#pragma unroll 1
    for (uint32_t first = thread; first < all; first += kAtOnce * threads) {
      LL16Packet::Words words[kAtOnce];
      WaitFor what = {PROXYCCL_WAIT_PACKET, PROXYCCL_NO_PEER, PROXYCCL_NO_CHANNEL, flag_};
      const bool complete = waitUntil(e_.control, what, [&](uint64_t* seen) {
        bool there = true;
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i)
          if (first + i * threads < all) words[i] = incoming[placeBut(known, first + i * threads)].load();
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
          if (first + i * threads >= all || words[i].carries(flag_)) continue;
          there = false;
          what.peer = placeBut(known, first + i * threads) / front();
          *seen = words[i].low >> 32;
        }
        return there;
      });
      if (!complete) return false;
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        if (first + i * threads >= all) continue;
        const uint32_t place = placeBut(known, first + i * threads);
        keep(place / front(), place % front(), bitsOf(words[i].payload()));
      }
    }
    return true;
  }

  PROXYCCL_DEVICE LL16Packet* packets(char* workspace) const {
    return reinterpret_cast<LL16Packet*>(workspace + offset_);
  }
  PROXYCCL_DEVICE uint32_t placeOf(uint32_t rank, uint32_t packet) const {
    if (packet < front()) return rank * front() + packet;
    return e_.world_size * front() + rank * e_.weight_packets + packet - front();
  }

  const uint64_t offset_;
};

}  // namespace proxyccl
