// Announcements with a row for each rank: for each rank a mask of the tokens that go there. Two words do what 256
// packets of ids would do for 128 tokens, and positions are counted bits.
//
// A rank's choices are 32-bit words: the first slot with an id that is out of range, or ~0; then for each rank a word
// for every 32 tokens.
#ifndef PROXYCCL_EXPERT_ANNOUNCEMENT_MASKS_H
#define PROXYCCL_EXPERT_ANNOUNCEMENT_MASKS_H

#include "expert_announcement.h"

namespace proxyccl {

class MaskAnnouncement : public Announcement {
 public:
  using Announcement::Announcement;

  // Called by the block: finds what this rank's tokens choose. It may be read after the next barrier.
  PROXYCCL_DEVICE void collect(const ProxycclDispatch& call) const {
    uint32_t* own = wordsOf(e_.rank);
    if (threadIdx.x == 0) {
      payloads()[e_.rank * front()] = headOf(call);
      own[0] = ~0u;
    }
    __syncthreads();
    const Choices choices(e_, call);
    const Group group;
#pragma unroll 1
    for (uint32_t w = group.number; w < wordsOfMask(); w += Group::count()) {
      uint32_t bad_slot = ~0u;
#if PROXYCCL_ON_HOST
      for (uint32_t rank = 0; rank < e_.world_size; ++rank) own[indexOf(rank, w)] = 0;
      for (uint32_t i = 0; i < 32; ++i) {
        const uint64_t ranks = ranksOf(choices, call, 32 * w + i, &bad_slot);
        for (uint32_t rank = 0; rank < e_.world_size; ++rank)
          own[indexOf(rank, w)] |= static_cast<uint32_t>(ranks >> rank & 1) << i;
      }
#else
      static_assert(PROXYCCL_WARP_SIZE >= 32, "a warp finds a word");
      const uint64_t ranks = group.lane < 32 ? ranksOf(choices, call, 32 * w + group.lane, &bad_slot) : 0;
#pragma unroll 1
      for (uint32_t rank = 0; rank < e_.world_size; ++rank) {
        const uint64_t word = ballotWarp(ranks >> rank & 1);
        if (group.lane == 0) own[indexOf(rank, w)] = static_cast<uint32_t>(word);
      }
#endif
      if (bad_slot != ~0u) atomicMin(&own[0], bad_slot);
    }
  }

  // Called by the block, a barrier behind collect(): block 0 sends everything. The last group sends the masks, for
  // which all wait, and the others the weights.
  PROXYCCL_DEVICE void send(const Group& group, const ProxycclDispatch& call) const {
    if (blockIdx.x != 0) return;
    const uint32_t others = blockDim.x - kGroupLanes;
    if (group.number == Group::count() - 1)
      return sendPackets(0, front(), group.lane, kGroupLanes,
                         [&](uint32_t packet) { return payloads()[e_.rank * front() + packet]; });
    const Choices choices(e_, call);
#pragma unroll 1
    for (uint32_t token = threadIdx.x; token < call.tokens; token += others)
      choices.forEachSlot(token, [&](const Choices::Slot& slot) {
        const int32_t first = slot.is_first ? PROXYCCL_FIRST_CHOICE : 0;
        const ProxycclExpertChoice choice = {slot.rank < e_.world_size ? static_cast<int32_t>(slot.id) | first : -1,
                                             slot.weight};
        sendPacket(front() + token * e_.topk + slot.k, __builtin_bit_cast(uint64_t, choice));
      });
    sendPackets(front() + call.tokens * e_.topk, packetsOfRank(), threadIdx.x, others, [](uint32_t) { return 0; });
  }

  // Called by `threads` threads: waits for all ranks, but not for this one if the block has collected. The block may
  // ask what they chose after its next barrier. Returns false to a thread whose packets did not come.
  PROXYCCL_DEVICE bool await(bool has_collected, uint32_t thread, uint32_t threads) const {
    return awaitAllBut(has_collected ? e_.rank : PROXYCCL_NO_PEER, thread, threads);
  }

  struct Choice {
    uint32_t expert;  // among those of all ranks, or PROXYCCL_NO_EXPERT
    float weight;
    bool is_first;  // of its token's slots for that rank
  };
  // Called by each of `threads` threads: calls body(source, slot, choice) for every slot of all sources for which
  // wanted(source, slot). Waits until their packets have come.
  template <class Wanted, class Body>
  PROXYCCL_DEVICE void forEachChoice(uint32_t thread, uint32_t threads, Wanted wanted, Body body) const {
    const uint32_t slots = e_.max_tokens * e_.topk, all = e_.world_size * slots;
#pragma unroll 1
    for (uint32_t n = thread; n < all; n += threads) {
      const uint32_t source = n / slots, slot = n % slots;
      if (slot < tokens(source) * e_.topk && wanted(source, slot))
        body(source, slot, choiceOf(awaitPacket(source, front() + slot)));
    }
  }

  // Whether a source's token goes to a rank.
  PROXYCCL_DEVICE bool goes(uint32_t source, uint32_t rank, uint32_t token) const {
    return wordsOf(source)[indexOf(rank, token / 32)] >> token % 32 & 1;
  }
  // How many of a source's tokens before this one go to a rank.
  PROXYCCL_DEVICE uint32_t countBefore(uint32_t source, uint32_t rank, uint32_t token) const {
    const uint32_t* mask = wordsOf(source) + indexOf(rank, 0);
    uint32_t count = token % 32 == 0 ? 0 : countBits(mask[token / 32] & ((1u << token % 32) - 1));
#pragma unroll 4
    for (uint32_t w = 0; w < token / 32; ++w) count += countBits(mask[w]);
    return count;
  }
  // How many of its tokens do.
  PROXYCCL_DEVICE uint32_t count(uint32_t source, uint32_t rank) const {
    return countBefore(source, rank, 32 * wordsOfMask());
  }
  // The first slot of a source with an id that is out of range, or ~0.
  PROXYCCL_DEVICE uint32_t badSlot(uint32_t source) const { return wordsOf(source)[0]; }

 private:
  static PROXYCCL_DEVICE Choice choiceOf(uint64_t bits) {
    const auto given = __builtin_bit_cast(ProxycclExpertChoice, bits);
    if (given.expert < 0) return {PROXYCCL_NO_EXPERT, given.weight, false};
    const uint32_t expert = static_cast<uint32_t>(given.expert);
    return {expert & ~PROXYCCL_FIRST_CHOICE, given.weight, (expert & PROXYCCL_FIRST_CHOICE) != 0};
  }
  // A bit for each rank that a token goes to; none if there is no such token. A slot of it with an id that is out of
  // range goes to *bad_slot, if that is greater.
  PROXYCCL_DEVICE uint64_t ranksOf(const Choices& choices, const ProxycclDispatch& call, uint32_t token,
                                   uint32_t* bad_slot) const {
    uint64_t ranks = 0;
    if (token >= call.tokens) return ranks;
    choices.forEachSlot(token, [&](const Choices::Slot& slot) {
      if (slot.rank < e_.world_size) ranks |= 1ull << slot.rank;
      const uint32_t number = token * e_.topk + slot.k;
      if (choices.isBad(slot) && number < *bad_slot) *bad_slot = number;
    });
    return ranks;
  }
  PROXYCCL_DEVICE uint32_t wordsOfMask() const { return (e_.max_tokens + 31) / 32; }
  PROXYCCL_DEVICE uint32_t* wordsOf(uint32_t source) const { return reinterpret_cast<uint32_t*>(choicesOf(source)); }
  PROXYCCL_DEVICE uint32_t indexOf(uint32_t rank, uint32_t word) const { return 1 + rank * wordsOfMask() + word; }
};

}  // namespace proxyccl

#endif
