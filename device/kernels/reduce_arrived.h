// reduce_arrived: the reduction after a schedule's transfers. Every peer's values have arrived in this rank's memory.
//
// The stream launches it when they have arrived (channels/schedules/DESIGN.md), so it waits for nothing. It needs few
// blocks.
#ifndef PROXYCCL_REDUCE_ARRIVED_H
#define PROXYCCL_REDUCE_ARRIVED_H

#include "arrived.h"
#include "instance.h"
#include "reduce_ranks.h"

namespace proxyccl {

// out[0, count) = the combination, in rank order, of in[0, count) and of the data that has arrived from every peer.
template <class T, class Op>
PROXYCCL_DEVICE void reduce_arrived(const ProxycclArrived& arrived, const T* in, T* out, uint64_t count) {
  reduceRanks<T, Op>(
      arrived.world_size, arrived.divisor, count, isAligned16(in) && isAligned16(out),
      blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x,
      [&](uint32_t source) {
        if (source == arrived.rank) return in;
        const uint32_t slot = source < arrived.rank ? source : source - 1;
        return reinterpret_cast<const T*>(arrived.slots + slot * arrived.slot_bytes);
      },
      [&](uint64_t i, const auto& sum) { sum.store(out + i); });
}

}  // namespace proxyccl

#endif
