// Renumbers experts for dispatches of a layer whose group has lost ranks.
#ifndef PROXYCCL_EXPERT_SURVIVORS_H
#define PROXYCCL_EXPERT_SURVIVORS_H

#include "experts/choices.h"

// Reads ids[slots], expert ids of 4 or 8 bytes below all_ranks * per_rank, and left[all_ranks], each rank's number
// among the remaining ranks, or -1 if it is lost. Writes kept[slots]: the expert's number among the remaining ranks'
// experts, `dropped` if the slot is dropped or the expert's rank is lost, -2 if the id is out of range. Writes
// lost[slots]: whether the expert's rank is lost.
extern "C" __global__ void __launch_bounds__(PROXYCCL_EXPERT_THREADS, 1)
    expert_survivors(const char* ids, const int32_t* left, int32_t* kept, bool* lost, uint32_t slots, uint32_t id_bytes,
                     uint32_t all_ranks, uint32_t per_rank, uint32_t dropping_ids, int32_t dropped) {
  using namespace proxyccl;
  const int64_t all = static_cast<int64_t>(all_ranks) * per_rank;
  forEach(slots, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x, [&](size_t slot) {
    const int64_t id =
        id_bytes == 8 ? reinterpret_cast<const int64_t*>(ids)[slot] : reinterpret_cast<const int32_t*>(ids)[slot];
    const bool chosen = id >= 0 && id < all;
    const int32_t rank = chosen ? left[id / per_rank] : -1;
    const bool drops = chosen || dropsSlot(dropping_ids, id, all);
    lost[slot] = chosen && rank < 0;
    kept[slot] = rank >= 0 ? rank * static_cast<int32_t>(per_rank) + static_cast<int32_t>(id % per_rank)
                 : drops   ? dropped
                           : -2;
  });
}
PROXYCCL_EXPORT_KERNEL(expert_survivors)

#endif
