// The combination of values that lie in one place a rank: what the bandwidth-bound reductions do with a round's data.
#ifndef PROXYCCL_REDUCE_RANKS_H
#define PROXYCCL_REDUCE_RANKS_H

#include "proxyccl/copy.h"
#include "proxyccl/reduce.h"

namespace proxyccl {

// As many values as one access moves.
template <class T, uint32_t kCount>
struct alignas(kCount * sizeof(T)) Pack {
  T values[kCount];

  static PROXYCCL_DEVICE Pack load(const T* from) {
#if !PROXYCCL_ON_HOST
    // NVRTC loads an array in a struct in halves.
    if constexpr (sizeof(Pack) == sizeof(Bytes16))
      return __builtin_bit_cast(Pack, *reinterpret_cast<const Bytes16*>(from));
#endif
    return *reinterpret_cast<const Pack*>(from);
  }
  PROXYCCL_DEVICE void store(T* to) const { *reinterpret_cast<Pack*>(to) = *this; }
};

template <class T, class Op, uint32_t kCount, class Source>
PROXYCCL_DEVICE Pack<T, kCount> reducePack(uint32_t ranks, uint32_t divisor, uint64_t i, Source source) {
  using A = typename Element<T>::Accumulator;
  constexpr uint32_t kAtOnce = 4;  // ranks whose values are loaded together
  A sums[kCount] = {};
#pragma unroll 1
  for (uint32_t first = 0; first < ranks; first += kAtOnce) {
    Pack<T, kCount> packs[kAtOnce];
#pragma unroll
    for (uint32_t r = 0; r < kAtOnce; ++r)
      if (first + r < ranks) packs[r] = Pack<T, kCount>::load(source(first + r) + i);
#pragma unroll
    for (uint32_t r = 0; r < kAtOnce; ++r) {
      if (first + r >= ranks) continue;
      for (uint32_t k = 0; k < kCount; ++k) {
        const A value = Element<T>::widen(packs[r].values[k]);
        sums[k] = first + r == 0 ? value : Op::combine(sums[k], value);
      }
    }
  }
  Pack<T, kCount> result;
  for (uint32_t k = 0; k < kCount; ++k) result.values[k] = Element<T>::narrow(Op::finish(sums[k], divisor));
  return result;
}

// Calls store(i, pack) with the combination of source(rank)[i, …) of all ranks, in rank order, for all of [0, n): 16
// bytes at once where `aligned`, else value by value. By the callers `thread` of `threads`. An average divides by
// `divisor`.
template <class T, class Op, class Source, class Store>
PROXYCCL_DEVICE void reduceRanks(uint32_t ranks, uint32_t divisor, uint64_t n, bool aligned, uint32_t thread, uint32_t threads,
                                 Source source, Store store) {
  constexpr uint32_t kWide = 16 / sizeof(T);
  const uint64_t wide = aligned ? n / kWide : 0;
  forEach(wide, thread, threads,
          [&](uint64_t i) { store(i * kWide, reducePack<T, Op, kWide>(ranks, divisor, i * kWide, source)); });
  forEach(n - wide * kWide, thread, threads,
          [&](uint64_t i) { store(wide * kWide + i, reducePack<T, Op, 1>(ranks, divisor, wide * kWide + i, source)); });
}

}  // namespace proxyccl

#endif
