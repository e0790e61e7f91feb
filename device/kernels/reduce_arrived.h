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

#if !PROXYCCL_ON_HOST
// The same of the first `units` units of 16 bytes, all aligned. A thread has several of them in flight from each rank:
// few blocks would otherwise wait for memory most of the time.
template <class T, class Op, class Source>
PROXYCCL_DEVICE void reduceArrivedUnits(const ProxycclArrived& arrived, uint64_t units, Source source, T* out) {
  constexpr uint32_t kUnits = sizeof(T) == 1 ? 2 : 4;  // sums of one byte take a register each too
  const uint64_t threads = static_cast<uint64_t>(gridDim.x) * blockDim.x;
  Bytes16* const to = reinterpret_cast<Bytes16*>(out);
#pragma unroll 1
  for (uint64_t first = static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; first < units;
       first += kUnits * threads) {
    auto inside = [=](uint32_t u) { return first + u * threads < units; };
    Bytes16 results[kUnits];
    combineUnits<T, Op, kUnits, Loads::kAhead>(
        arrived.world_size, arrived.divisor,
        [&](uint32_t rank) {
          return [=, from = reinterpret_cast<const Bytes16*>(source(rank)) + first](uint32_t u) {
            return inside(u) ? from[u * threads] : Bytes16{};
          };
        },
        results);
#pragma unroll
    for (uint32_t u = 0; u < kUnits; ++u)
      if (inside(u)) store128(to + first + u * threads, results[u].low, results[u].high);
  }
}
#endif

// out[0, count) = the combination, in rank order, of in[0, count) and of the data that has arrived from every peer.
template <class T, class Op>
PROXYCCL_DEVICE void reduce_arrived(const ProxycclArrived& arrived, const T* in, T* out, uint64_t count) {
  auto source = [&](uint32_t rank) {
    if (rank == arrived.rank) return in;
    const uint32_t slot = rank < arrived.rank ? rank : rank - 1;
    return reinterpret_cast<const T*>(arrived.slots + slot * arrived.slot_bytes);
  };
  uint64_t done = 0;
#if !PROXYCCL_ON_HOST
  constexpr uint32_t kWide = 16 / sizeof(T);
  if (isAligned16(in) && isAligned16(out)) {
    reduceArrivedUnits<T, Op>(arrived, count / kWide, source, out);
    done = count / kWide * kWide;
  }
#endif
  reduceRanks<T, Op>(
      arrived.world_size, arrived.divisor, count - done, false, blockIdx.x * blockDim.x + threadIdx.x,
      gridDim.x * blockDim.x, [&](uint32_t rank) { return source(rank) + done; },
      [&](uint64_t i, const auto& sum) { sum.store(out + done + i); });
}

}  // namespace proxyccl

#endif
