// What the caller's slots choose, as a dispatch counts them: experts, or the ranks of a token with a row for each.
#ifndef PROXYCCL_EXPERT_CHOICES_H
#define PROXYCCL_EXPERT_CHOICES_H

#include "expert_team.h"

namespace proxyccl {

// An element of 2, 4 or 8 bytes of any type.
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

class Choices {
 public:
  PROXYCCL_DEVICE Choices(const ProxycclExperts& experts, const ProxycclDispatch& call) : e_(experts), call_(call) {}

  // Whether a token has a row for each rank. A repeated dispatch takes the ids that its dispatch counted.
  PROXYCCL_DEVICE bool byRank() const { return e_.chosen_per_rank != 0 && call_.redispatch == 0; }

  // Where a slot goes, of which later slots of a token with a row for each rank don't count: its expert, or the rank of
  // that. What drops a slot is their number, and what is out of range -1.
  PROXYCCL_DEVICE int32_t target(uint64_t slot) const {
    const int64_t expert = given(slot);
    if (!byRank()) {
      const int64_t experts = static_cast<int64_t>(e_.world_size) * e_.experts_per_rank;
      return expert >= 0 && expert <= experts ? static_cast<int32_t>(expert) : -1;
    }
    const int64_t experts = static_cast<int64_t>(e_.world_size) * e_.chosen_per_rank;
    const int32_t none = static_cast<int32_t>(e_.world_size);
    if (expert < 0 || expert >= experts) return expert == -1 || expert == experts ? none : -1;
    return static_cast<int32_t>(static_cast<uint32_t>(expert) / e_.chosen_per_rank);
  }

  // The id under which a slot is counted. An id that is out of range stays so. With a row for each rank it is the rank
  // of the slot's expert at the first slot of a token that goes there, and the id that drops a slot at later ones.
  PROXYCCL_DEVICE int32_t id(uint64_t slot) const {
    if (!byRank()) return static_cast<int32_t>(given(slot));
    const int32_t none = static_cast<int32_t>(e_.world_size), found = target(slot);
    if (found < 0 || found == none) return found;
    const uint32_t rank = static_cast<uint32_t>(found);
    bool first = true;
#pragma unroll 4
    for (uint64_t before = slot - slot % e_.topk; before < slot; ++before) {
      const int64_t other = given(before) - static_cast<int64_t>(rank) * e_.chosen_per_rank;
      first &= other < 0 || other >= e_.chosen_per_rank;
    }
    return first ? static_cast<int32_t>(rank) : none;
  }

  // What travels with a slot: its weight, or with a row for each rank its ProxycclExpertChoice. It has weight_bytes.
  PROXYCCL_DEVICE bool areCarried() const { return byRank() || call_.weights != nullptr; }
  PROXYCCL_DEVICE uint64_t carried(uint64_t slot) const {
    if (!byRank()) return loadRaw(call_.weights + slot * e_.weight_bytes, e_.weight_bytes);
    const int64_t expert = given(slot), experts = static_cast<int64_t>(e_.world_size) * e_.chosen_per_rank;
    const bool chosen = expert >= 0 && expert < experts;
    return __builtin_bit_cast(uint64_t, ProxycclExpertChoice{chosen ? static_cast<int32_t>(expert) : -1, weight(slot)});
  }

 private:
  PROXYCCL_DEVICE int64_t given(uint64_t slot) const {
    if (call_.id_bytes == 8) return reinterpret_cast<const int64_t*>(call_.expert_ids)[slot];
    return reinterpret_cast<const int32_t*>(call_.expert_ids)[slot];
  }
  PROXYCCL_DEVICE float weight(uint64_t slot) const {
    return call_.weights == nullptr ? 0 : reinterpret_cast<const float*>(call_.weights)[slot];
  }

  const ProxycclExperts& e_;
  const ProxycclDispatch& call_;
};

}  // namespace proxyccl

#endif
