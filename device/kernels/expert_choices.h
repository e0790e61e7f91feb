// Before a dispatch with a row for each rank: which ranks a token goes to, and what it chose there.
#ifndef PROXYCCL_EXPERT_CHOICES_H
#define PROXYCCL_EXPERT_CHOICES_H

#include "expert_team.h"

// From ids[slots] of 4 or 8 bytes and weights[slots], or null: ranks[slots], where a rank stands at the first slot of a
// token that goes there, world_size at slots that are dropped or come later, and -1 at ids that are out of range; and
// choices[slots]. The ids -1 and world_size * per_rank drop a slot.
extern "C" __global__ void __launch_bounds__(PROXYCCL_EXPERT_THREADS, 1)
    expert_choices(const char* ids, const float* weights, int32_t* ranks, ProxycclExpertChoice* choices, uint32_t slots,
                   uint32_t topk, uint32_t id_bytes, uint32_t world_size, uint32_t per_rank) {
  using namespace proxyccl;
  const int64_t experts = static_cast<int64_t>(world_size) * per_rank;
  auto expertAt = [&](size_t slot) {
    return id_bytes == 8 ? reinterpret_cast<const int64_t*>(ids)[slot] : reinterpret_cast<const int32_t*>(ids)[slot];
  };
  auto inRange = [&](int64_t expert) { return expert >= 0 && expert < experts; };
  forEach(slots, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x, [&](size_t slot) {
    const int64_t expert = expertAt(slot);
    const bool chosen = inRange(expert);
    const bool dropped = expert == -1 || expert == experts;
    int64_t rank = chosen ? expert / per_rank : dropped ? static_cast<int64_t>(world_size) : -1;
    for (size_t before = slot - slot % topk; chosen && before < slot; ++before)
      if (inRange(expertAt(before)) && expertAt(before) / per_rank == rank) {
        rank = world_size;
        break;
      }
    ranks[slot] = static_cast<int32_t>(rank);
    choices[slot] = {chosen ? static_cast<int32_t>(expert) : -1, weights != nullptr ? weights[slot] : 0};
  });
}
PROXYCCL_EXPORT_KERNEL(expert_choices)

#endif
