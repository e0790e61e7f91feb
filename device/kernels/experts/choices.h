// Reads the choice of each slot of the caller's tokens. A choice is an expert or, if a token has one row per rank, a
// rank.
#pragma once

#include "experts/expert_team.h"

namespace proxyccl {

PROXYCCL_DEVICE uint64_t loadRaw(const char* from, uint32_t bytes) {
  if (bytes == 4) return *reinterpret_cast<const uint32_t*>(from);
  if (bytes == 8) return *reinterpret_cast<const uint64_t*>(from);
  return *reinterpret_cast<const uint16_t*>(from);
}
PROXYCCL_DEVICE void storeRaw(char* to, uint64_t element, uint32_t bytes) {
  if (bytes == 4) {
    *reinterpret_cast<uint32_t*>(to) = static_cast<uint32_t>(element);
  } else if (bytes == 8) {
    *reinterpret_cast<uint64_t*>(to) = element;
  } else {
    *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(element);
  }
}

// Returns whether an id outside [0, experts) drops its slot without an error, according to `dropping_ids`.
PROXYCCL_DEVICE bool dropsSlot(uint32_t dropping_ids, int64_t id, int64_t experts) {
  return (id == -1 && dropping_ids & PROXYCCL_MINUS_ONE_DROPS) ||
         (id == experts && dropping_ids & PROXYCCL_NUMBER_DROPS);
}

class Choices {
 public:
  PROXYCCL_DEVICE Choices(const ProxycclExperts& experts, const ProxycclDispatch& call) : e_(experts), call_(call) {}

  // Returns whether expert ids must be turned into ranks. This is true if tokens have one row per rank, except in a
  // repeated dispatch, which reads ids that the original dispatch has already turned into ranks.
  PROXYCCL_DEVICE bool byRank() const { return e_.chosen_per_rank != 0 && call_.redispatch == 0; }

  // Returns a slot's target: its expert or, if byRank(), the expert's rank. Returns the number of experts or ranks if
  // the slot is dropped, and -1 if its id is out of range.
  PROXYCCL_DEVICE int32_t target(uint32_t slot) const {
    const int64_t expert = given(slot);
    if (call_.redispatch) return static_cast<int32_t>(expert);  // the target that the original dispatch has stored
    const uint32_t of_rank = byRank() ? e_.chosen_per_rank : e_.experts_per_rank;
    const int64_t experts = static_cast<int64_t>(e_.world_size) * of_rank;
    const uint32_t none = byRank() ? e_.world_size : static_cast<uint32_t>(experts);
    if (expert < 0 || expert >= experts)
      return dropsSlot(e_.dropping_ids, expert, experts) ? static_cast<int32_t>(none) : -1;
    return static_cast<int32_t>(byRank() ? static_cast<uint32_t>(expert) / of_rank : static_cast<uint32_t>(expert));
  }

  // Returns the id under which a slot is counted, which is the slot's target. If byRank(), only the first of a token's
  // slots with the same rank is counted; for a later slot, id() returns the id that drops a slot.
  PROXYCCL_DEVICE int32_t id(uint32_t slot) const {
    const int32_t none = static_cast<int32_t>(e_.world_size), found = target(slot);
    if (!byRank() || found < 0 || found == none) return found;
    return isFirst(slot, static_cast<uint32_t>(found)) ? found : none;
  }

  // Returns whether test(rank) is true for the rank of any of a token's slots. Must not be called in a repeated
  // dispatch.
  template <class Test>
  PROXYCCL_DEVICE bool anyRank(uint32_t token, Test test) const {
    const uint32_t per_rank = byRank() ? e_.chosen_per_rank : e_.experts_per_rank;
    const uint64_t experts = static_cast<uint64_t>(e_.world_size) * per_rank;
    bool found = false;
#pragma unroll 1
    for (uint32_t begin = 0; begin < e_.topk; begin += kAtOnce) {
      int64_t ids[kAtOnce];
      loadIds(token * e_.topk, begin, ids);
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i)
        if (static_cast<uint64_t>(ids[i]) < experts) found |= test(static_cast<uint32_t>(ids[i]) / per_rank);
    }
    return found;
  }

  // Returns whether each slot carries a value of weight_bytes bytes: the slot's weight or, if byRank(), its
  // ProxycclExpertChoice.
  PROXYCCL_DEVICE bool areCarried() const { return byRank() || call_.weights != nullptr; }
  PROXYCCL_DEVICE uint64_t carried(uint32_t slot) const {
    if (!byRank()) return loadRaw(call_.weights + static_cast<uint64_t>(slot) * e_.weight_bytes, e_.weight_bytes);
    const int64_t expert = given(slot), experts = static_cast<int64_t>(e_.world_size) * e_.chosen_per_rank;
    const bool chosen = expert >= 0 && expert < experts;
    return __builtin_bit_cast(uint64_t, ProxycclExpertChoice{chosen ? static_cast<int32_t>(expert) : -1, weight(slot)});
  }

  struct Slot {
    uint32_t k;
    int64_t id;
    uint32_t rank;  // the expert's rank; world_size if the id names no expert
    bool is_first;  // whether this is the token's first slot with that rank
  };
  // Calls body(slot) for each slot of a token. Requires byRank() and at most PROXYCCL_MASKED_RANKS ranks.
  template <class Body>
  PROXYCCL_DEVICE void forEachSlot(uint32_t token, Body body) const {
    const uint32_t experts = e_.world_size * e_.chosen_per_rank, first = token * e_.topk;
    // The multiplication by the reciprocal divides exactly, because experts * chosen_per_rank is less than 2^32.
    const uint64_t reciprocal = 0xffffffffu / e_.chosen_per_rank + 1ull;
    uint64_t seen = 0;  // bit r is set when a slot of rank r was seen
#pragma unroll 1
    for (uint32_t begin = 0; begin < e_.topk; begin += kAtOnce) {
      int64_t ids[kAtOnce];
      loadIds(first, begin, ids);
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) {
        if (begin + i >= e_.topk) continue;
        const bool exists = static_cast<uint64_t>(ids[i]) < experts;
        const uint32_t rank =
            exists ? static_cast<uint32_t>(static_cast<uint32_t>(ids[i]) * reciprocal >> 32) : e_.world_size;
        const uint64_t bit = exists ? 1ull << rank : 0;
        body(Slot{begin + i, ids[i], rank, (bit & ~seen) != 0});
        seen |= bit;
      }
    }
  }
  PROXYCCL_DEVICE bool isBad(const Slot& slot) const {
    return slot.rank == e_.world_size &&
           !dropsSlot(e_.dropping_ids, slot.id, static_cast<int64_t>(e_.world_size) * e_.chosen_per_rank);
  }

 private:
  static constexpr uint32_t kAtOnce = 8;  // loads in flight per thread

  // Loads up to kAtOnce ids of a token's slots, from k = begin on; the token's slot 0 has number `first`.
  PROXYCCL_DEVICE void loadIds(uint32_t first, uint32_t begin, int64_t* ids) const {
    const int64_t* wide = reinterpret_cast<const int64_t*>(call_.expert_ids) + first + begin;
    const int32_t* narrow = reinterpret_cast<const int32_t*>(call_.expert_ids) + first + begin;
    // All loads have the same width, because a branch on the width between two loads would delay the second load.
    if (call_.id_bytes == 8) {
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) ids[i] = begin + i < e_.topk ? wide[i] : -1;
    } else {
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i) ids[i] = begin + i < e_.topk ? narrow[i] : -1;
    }
  }
  PROXYCCL_DEVICE bool isFirst(uint32_t slot, uint32_t rank) const {
    const uint32_t own = slot % e_.topk;
    const int64_t experts = static_cast<int64_t>(rank) * e_.chosen_per_rank;
    bool first = true;
#pragma unroll 1
    for (uint32_t begin = 0; begin < own; begin += kAtOnce) {
      int64_t ids[kAtOnce];
      loadIds(slot - own, begin, ids);
#pragma unroll
      for (uint32_t i = 0; i < kAtOnce; ++i)
        first &= begin + i >= own || static_cast<uint64_t>(ids[i] - experts) >= e_.chosen_per_rank;
    }
    return first;
  }
  PROXYCCL_DEVICE int64_t given(uint32_t slot) const {
    if (call_.id_bytes == 8) return reinterpret_cast<const int64_t*>(call_.expert_ids)[slot];
    return reinterpret_cast<const int32_t*>(call_.expert_ids)[slot];
  }
  PROXYCCL_DEVICE float weight(uint32_t slot) const {
    return call_.weights == nullptr ? 0 : reinterpret_cast<const float*>(call_.weights)[slot];
  }

  const ProxycclExperts& e_;
  const ProxycclDispatch& call_;
};

}  // namespace proxyccl
