// Replaces the expert ids of a dispatch by places of the remaining ranks.
#pragma once

#include "experts/choices.h"

// Reads ids[slots]: topk expert ids per token, each of id_bytes (4 or 8) bytes. Reads `table`, which holds experts + 1
// indices and then a list of places. The places of expert e in this list begin at the value of index e, and end before
// the value of index e + 1. Writes kept[slots]: the place to which the slot's token goes, `dropped` if the slot is
// dropped or the expert has no place, -2 if the id is out of range. An expert's tokens take turns at its places;
// different ranks begin with different places. Writes lost[slots]: whether the expert has no place.
extern "C" __global__ void __launch_bounds__(PROXYCCL_EXPERT_THREADS, 1)
    expert_places(const char* ids, const int32_t* table, int32_t* kept, bool* lost, uint32_t slots, uint32_t id_bytes,
                  uint32_t experts, uint32_t topk, uint32_t rank, uint32_t dropping_ids, int32_t dropped) {
  using namespace proxyccl;
  const int32_t* places = table + experts + 1;
  forEach(slots, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x, [&](size_t slot) {
    const int64_t id =
        id_bytes == 8 ? reinterpret_cast<const int64_t*>(ids)[slot] : reinterpret_cast<const int32_t*>(ids)[slot];
    const bool chosen = id >= 0 && id < experts;
    const uint32_t first = chosen ? static_cast<uint32_t>(table[id]) : 0;
    const uint32_t count = chosen ? static_cast<uint32_t>(table[id + 1]) - first : 0;
    const bool drops = chosen || dropsSlot(dropping_ids, id, experts);
    lost[slot] = chosen && count == 0;
    kept[slot] = count != 0 ? places[first + (rank + static_cast<uint32_t>(slot / topk)) % count]
                 : drops    ? dropped
                            : -2;
  });
}
PROXYCCL_EXPORT_KERNEL(expert_places)
