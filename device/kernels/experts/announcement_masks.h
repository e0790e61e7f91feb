// Announcements as masks, for dispatches that send a token at most once to each rank. An announcement carries one mask
// per destination rank, in which a token's bit is set if the token goes to that rank. A row's position is the number of
// set bits before its token's bit.
//
// A rank's choices begin with one packet for each block that announces. The packet holds the number of the first slot
// in the block's share whose id is out of range, or ~0 if there is none. The masks follow these packets: for each rank,
// one packet per 64 tokens.
#pragma once

#include "experts/announcement.h"

namespace proxyccl {

// With few tokens (kShared is false), block 0 announces all tokens of its rank, and every block computes its own rank's
// masks. With many tokens, each block announces a share of the rank's tokens, and receives the masks of all ranks, its
// own rank included, in packets.
template <bool kShared>
class MaskAnnouncement : public Announcement {
 public:
  using Announcement::Announcement;

  // Called by the block before any other method; a barrier must follow.
  PROXYCCL_DEVICE void clear() const {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < countWords(); i += blockDim.x) counts()[i] = 0;
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i < e_.world_size; i += blockDim.x) badSlots()[i] = ~0u;
  }

  // Called by the block: reads the choices of this rank's tokens or, if kShared, of the block's share of these tokens.
  // The block may use these choices after the next barrier.
  PROXYCCL_DEVICE void collect(const ProxycclDispatch& call) const {
    if (threadIdx.x == 0) heads()[e_.rank] = headOf(call);
    const Choices choices(e_, call);
    const Group group;
    const Share share = this->share();
#pragma unroll 1
    for (uint32_t w = 2 * share.begin + group.number; w < 2 * share.end; w += Group::count()) {
      uint32_t bad_slot = ~0u;
#if PROXYCCL_ON_HOST
      for (uint32_t rank = 0; rank < e_.world_size; ++rank) leaving(rank)[w] = 0;
      for (uint32_t i = 0; i < 32; ++i) {
        const uint64_t ranks = ranksOf(choices, call, 32 * w + i, &bad_slot);
        for (uint32_t rank = 0; rank < e_.world_size; ++rank)
          leaving(rank)[w] |= static_cast<uint32_t>(ranks >> rank & 1) << i;
      }
#else
      static_assert(PROXYCCL_WARP_SIZE >= 32, "a warp finds a word");
      const uint64_t ranks = group.lane < 32 ? ranksOf(choices, call, 32 * w + group.lane, &bad_slot) : 0;
#pragma unroll 1
      for (uint32_t rank = 0; rank < e_.world_size; ++rank) {
        const uint64_t word = ballotWarp(ranks >> rank & 1);
        if (group.lane == 0) leaving(rank)[w] = static_cast<uint32_t>(word);
      }
      group.sync();
#endif
#pragma unroll 1
      for (uint32_t rank = group.lane; rank < e_.world_size && !kShared; rank += kGroupLanes)
        keep(e_.rank, rank, w, leaving(rank)[w]);
      if (bad_slot != ~0u) atomicMin(&badSlots()[e_.rank], bad_slot);
    }
  }

  // Called by the block after collect(), ExpertTeam::loadLookup() and a barrier: sends its announcement. The last group
  // sends the masks, for which all ranks wait; the other groups send the weights.
  PROXYCCL_DEVICE void send(const Group& group, const ProxycclDispatch& call) const {
    if (blockIdx.x >= announcers()) return;
    const Share share = this->share();
    char* const* peers = ExpertTeam::peers();
    if (group.number == Group::count() - 1) {
      const uint32_t pairs = share.end - share.begin;
#pragma unroll 1
      for (uint32_t i = group.lane; i < 2 + pairs * e_.world_size; i += kGroupLanes) {
        uint32_t packet = 0;
        uint64_t bits = headOf(call);
        if (i == 1) {
          packet = 1 + blockIdx.x;
          bits = badSlots()[e_.rank];
        } else if (i > 1) {
          const uint32_t rank = (i - 2) / pairs, pair = share.begin + (i - 2) % pairs;
          const uint32_t* words = leaving(rank) + 2 * pair;
          packet = packetOf(rank, pair);
          bits = words[0] | static_cast<uint64_t>(words[1]) << 32;
        }
        if (i > 0 || blockIdx.x == 0) sendPacket(peers, packet, bits);
      }
      return;
    }
    const Choices choices(e_, call);
    const uint32_t others = blockDim.x - kGroupLanes, begin = share.begin * kTokensOfPair;
    const uint32_t end = atMost(share.end * kTokensOfPair, e_.max_tokens), given = atMost(end, call.tokens);
    // Neighbouring threads handle neighbouring slots, so that a group's packets are contiguous in memory.
#pragma unroll 1
    for (uint32_t slot = begin * e_.topk + threadIdx.x; slot < given * e_.topk; slot += others) {
      auto choice = __builtin_bit_cast(ProxycclExpertChoice, choices.carried(slot));
      if (static_cast<uint32_t>(choices.id(slot)) < e_.world_size) choice.expert |= PROXYCCL_FIRST_CHOICE;
      sendPacket(peers, front() + slot, __builtin_bit_cast(uint64_t, choice));
    }
    sendPackets(peers, front() + (given > begin ? given : begin) * e_.topk, front() + end * e_.topk, threadIdx.x,
                others, [](uint32_t) { return 0; });
  }

  // Called by `threads` threads: waits for the masks of all ranks, except this rank's own masks if collect() has read
  // the choices of all tokens of this rank. The block may read the ranks' choices after its next barrier or, if
  // kShared, after sumUp() and another barrier. Returns false to a thread whose packets did not arrive.
  PROXYCCL_DEVICE bool await(bool has_collected, uint32_t thread, uint32_t threads) const {
    const uint32_t known = has_collected && !kShared ? e_.rank : PROXYCCL_NO_PEER;
    return awaitAllBut(known, thread, threads, [&](uint32_t source, uint32_t packet, uint64_t payload) {
      if (packet == 0) {
        heads()[source] = payload;
      } else if (packet <= announcers()) {
        atomicMin(&badSlots()[source], static_cast<uint32_t>(payload));
      } else {
        const uint32_t i = packet - 1 - announcers(), rank = i / pairs(), pair = i % pairs();
        keep(source, rank, 2 * pair, static_cast<uint32_t>(payload));
        keep(source, rank, 2 * pair + 1, static_cast<uint32_t>(payload >> 32));
      }
    });
  }
  // Called by `threads` threads when all masks have arrived: counts the set bits before every PROXYCCL_SUMMED_WORDS-th
  // word of each mask.
  PROXYCCL_DEVICE void sumUp(uint32_t thread, uint32_t threads) const {
#pragma unroll 1
    for (uint32_t i = thread; i < 2 * e_.world_size; i += threads) {
      const uint32_t* mask = wordsOf(i);
      uint32_t count = 0;
#pragma unroll 1
      for (uint32_t sum = 0; sum < sums(); ++sum) {
        sumsOf(i)[sum] = count;
#pragma unroll
        for (uint32_t w = 0; w < PROXYCCL_SUMMED_WORDS; ++w)
          if (sum * PROXYCCL_SUMMED_WORDS + w < words()) count += countBits(mask[sum * PROXYCCL_SUMMED_WORDS + w]);
      }
    }
  }

  struct Choice {
    uint32_t expert;  // the expert's number among all ranks' experts, or PROXYCCL_NO_EXPERT
    float weight;
    bool is_first;  // whether no earlier slot of the token has an expert on the same rank
  };
  // Called by each of `threads` threads: calls body(source, slot, choice) for every slot of all sources for which
  // wanted(source, slot) is true. Waits for the slots' packets. With few tokens a thread loads several packets
  // concurrently. With many tokens a thread loads one packet at a time, because more loads would take registers from
  // the stores of rows in the same kernel: with four loads, a dispatch of 4096 tokens took 7 % longer on 4 H200.
  template <class Wanted, class Body>
  PROXYCCL_DEVICE void forEachChoice(uint32_t thread, uint32_t threads, Wanted wanted, Body body) const {
    const uint32_t slots = e_.max_tokens * e_.topk;
    if constexpr (kShared) {
#pragma unroll 1
      for (uint32_t n = thread; n < e_.world_size * slots; n += threads) {
        const uint32_t source = n / slots, slot = n % slots;
        if (slot < tokens(source) * e_.topk && wanted(source, slot))
          body(source, slot, choiceOf(awaitPacket(source, front() + slot)));
      }
    } else {
      constexpr uint32_t kAtOnce = 4;
#pragma unroll 1
      for (uint32_t slot = thread; slot < slots; slot += threads)
#pragma unroll 1
        for (uint32_t first = 0; first < e_.world_size; first += kAtOnce) {
          LL16Packet::Words words[kAtOnce];
          uint32_t awaited = 0;
#pragma unroll
          for (uint32_t i = 0; i < kAtOnce; ++i) {
            if (first + i >= e_.world_size || slot >= tokens(first + i) * e_.topk || !wanted(first + i, slot)) continue;
            awaited |= 1u << i;
            words[i] = packetOfSlot(first + i, slot).load();
          }
#pragma unroll 1
          for (uint32_t source = first; awaited != 0; awaited >>= 1, ++source) {
            if (!(awaited & 1)) continue;
            LL16Packet::Words own = words[0];
#pragma unroll
            for (uint32_t i = 1; i < kAtOnce; ++i)
              if (source - first == i) own = words[i];
            body(source, slot,
                 choiceOf(own.carries(flag_) ? bitsOf(own.payload()) : awaitPacket(source, front() + slot)));
          }
        }
    }
  }
  // Calls body(expert) for every slot of the tokens that come to this rank. Each thread has several loads in flight,
  // because otherwise, with many tokens, the loads would take as long as moving the rows.
  template <class Body>
  PROXYCCL_DEVICE void forEachArriving(uint32_t thread, uint32_t threads, Body body) const {
    constexpr uint32_t kAtOnce = 8;
#pragma unroll 1
    for (uint32_t source = 0; source < e_.world_size; ++source) {
      const uint32_t end = tokens(source) * e_.topk;
#pragma unroll 1
      for (uint32_t first = thread; first < end; first += kAtOnce * threads) {
        LL16Packet::Words words[kAtOnce];
        uint32_t missing = 0;
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
          const uint32_t slot = first + i * threads;
          if (slot >= end || !from(source).has(slot / e_.topk)) continue;
          missing |= 1u << i;
          words[i] = packetOfSlot(source, slot).load();
        }
#pragma unroll
        for (uint32_t i = 0; i < kAtOnce; ++i) {
          if (!(missing >> i & 1) || !words[i].carries(flag_)) continue;
          missing &= ~(1u << i);
          body(choiceOf(bitsOf(words[i].payload())).expert);
        }
#pragma unroll 1
        for (uint32_t slot = first; missing != 0; missing >>= 1, slot += threads)
          if (missing & 1) body(choiceOf(awaitPacket(source, front() + slot)).expert);
      }
    }
  }

  // A set of tokens: this rank's tokens that go to one rank, or one source's tokens that come to this rank.
  class Mask {
   public:
    PROXYCCL_DEVICE bool has(uint32_t token) const { return words_[token / 32] >> token % 32 & 1; }
    PROXYCCL_DEVICE uint32_t countBefore(uint32_t token) const {
      const uint32_t word = token / 32, sum = kShared ? word / PROXYCCL_SUMMED_WORDS : 0;
      uint32_t count = kShared ? sums_[sum] : 0;
      if (token % 32 != 0) count += countBits(words_[word] & ((1u << token % 32) - 1));
#pragma unroll 4
      for (uint32_t w = sum * PROXYCCL_SUMMED_WORDS; w < word; ++w) count += countBits(words_[w]);
      return count;
    }

   private:
    friend class MaskAnnouncement;
    PROXYCCL_DEVICE Mask(const uint32_t* words, const uint32_t* sums) : words_(words), sums_(sums) {}
    const uint32_t *words_, *sums_;
  };
  PROXYCCL_DEVICE Mask to(uint32_t rank) const { return mask(rank); }
  PROXYCCL_DEVICE Mask from(uint32_t source) const { return mask(e_.world_size + source); }
  PROXYCCL_DEVICE uint32_t count(uint32_t source, uint32_t rank) const {
    const uint32_t i = source * e_.world_size + rank;
    return counts()[i / 2] >> i % 2 * 16 & 0xffff;
  }
  PROXYCCL_DEVICE uint32_t badSlot(uint32_t source) const { return badSlots()[source]; }

 private:
  static constexpr uint32_t kTokensOfPair = 64;  // a packet holds a pair of words, with a bit for each token

  static PROXYCCL_DEVICE uint32_t atMost(uint32_t n, uint32_t most) { return n < most ? n : most; }
  static PROXYCCL_DEVICE Choice choiceOf(uint64_t bits) {
    const auto given = __builtin_bit_cast(ProxycclExpertChoice, bits);
    if (given.expert < 0) return {PROXYCCL_NO_EXPERT, given.weight, false};
    const uint32_t expert = static_cast<uint32_t>(given.expert);
    return {expert & ~PROXYCCL_FIRST_CHOICE, given.weight, (expert & PROXYCCL_FIRST_CHOICE) != 0};
  }
  // Returns a bit mask of the ranks to which a token goes; 0 if this rank has no token of that number. Lowers *bad_slot
  // to the token's first slot whose id is out of range.
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

  PROXYCCL_DEVICE uint32_t announcers() const { return kShared ? e_.blocks : 1; }
  struct Share {
    uint32_t begin, end;  // pairs of words
  };
  PROXYCCL_DEVICE Share share() const {
    if (!kShared) return {0, pairs()};
    return {pairs() * blockIdx.x / announcers(), pairs() * (blockIdx.x + 1) / announcers()};
  }
  PROXYCCL_DEVICE uint32_t packetOf(uint32_t rank, uint32_t pair) const {
    return 1 + announcers() + rank * pairs() + pair;
  }
  // Counts the tokens in word `w` of the mask of tokens that go from a source to a rank, and stores the word if one of
  // the two ranks is this rank.
  PROXYCCL_DEVICE void keep(uint32_t source, uint32_t rank, uint32_t w, uint32_t word) const {
    if (source == e_.rank) leaving(rank)[w] = word;
    if (rank == e_.rank) arriving(source)[w] = word;
    const uint32_t i = source * e_.world_size + rank;
    if (word != 0) atomicAdd(&counts()[i / 2], countBits(word) << i % 2 * 16);
  }

  // -- the block's data after the heads ---
  PROXYCCL_DEVICE uint32_t pairs() const { return (e_.max_tokens + kTokensOfPair - 1) / kTokensOfPair; }
  PROXYCCL_DEVICE uint32_t words() const { return 2 * pairs(); }
  PROXYCCL_DEVICE uint32_t sums() const { return (words() + PROXYCCL_SUMMED_WORDS - 1) / PROXYCCL_SUMMED_WORDS; }
  PROXYCCL_DEVICE uint32_t* badSlots() const { return reinterpret_cast<uint32_t*>(behindHeads()); }
  PROXYCCL_DEVICE uint32_t* counts() const { return badSlots() + e_.world_size; }  // a word holds two counts
  PROXYCCL_DEVICE uint32_t countWords() const { return (e_.world_size * e_.world_size + 1) / 2; }
  // Returns the words of a mask. Mask r < world_size marks this rank's tokens that go to rank r; mask world_size + s
  // marks source s's tokens that come to this rank.
  PROXYCCL_DEVICE uint32_t* wordsOf(uint32_t mask) const { return counts() + countWords() + mask * words(); }
  PROXYCCL_DEVICE uint32_t* sumsOf(uint32_t mask) const { return wordsOf(2 * e_.world_size) + mask * sums(); }
  PROXYCCL_DEVICE Mask mask(uint32_t number) const { return {wordsOf(number), sumsOf(number)}; }
  PROXYCCL_DEVICE uint32_t* leaving(uint32_t rank) const { return wordsOf(rank); }
  PROXYCCL_DEVICE uint32_t* arriving(uint32_t source) const { return wordsOf(e_.world_size + source); }
};

}  // namespace proxyccl
