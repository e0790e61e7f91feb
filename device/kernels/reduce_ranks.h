// Combines the values of all ranks, for the bandwidth-bound reductions. Each rank's values are contiguous in memory.
#pragma once

#include "integers.h"
#include "proxyccl/copy.h"
#include "proxyccl/reduce.h"

namespace proxyccl {

PROXYCCL_DEVICE bool isAligned16(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

template <class T, uint32_t kCount>
struct alignas(kCount * sizeof(T)) Pack {
  T values[kCount];

  // load() and store() use Bytes16, because NVRTC loads an array in a struct in halves, and stores it value by value.
  static PROXYCCL_DEVICE Pack load(const T* from) {
    if constexpr (sizeof(Pack) == sizeof(Bytes16))
      return __builtin_bit_cast(Pack, *reinterpret_cast<const Bytes16*>(from));
    return *reinterpret_cast<const Pack*>(from);
  }
  PROXYCCL_DEVICE void store(T* to) const {
    if constexpr (sizeof(Pack) == sizeof(Bytes16)) {
      const Bytes16 bytes = __builtin_bit_cast(Bytes16, *this);
      return store128(to, bytes.low, bytes.high);
    }
    *reinterpret_cast<Pack*>(to) = *this;
  }
};

#if PROXYCCL_ON_HOST
// The contiguous results that a thread on the host computes in one step.
template <class T>
struct Run {
  const T* values;
  uint64_t count;

  PROXYCCL_DEVICE void store(T* to) const { proxyccl_memmove(to, values, count * sizeof(T)); }
};

// Called by one thread: combines source(rank)[begin, end) of all ranks in rank order, and calls store(i, run) for each
// run of results, where i is the index of its first result. Each loop reads one rank's array, so that C++ compilers
// vectorise the loop. A run is so short that it stays in the first-level cache until the next loop.
template <class T, class Op, class Source, class Store>
PROXYCCL_DEVICE void reduceRuns(uint32_t ranks, uint32_t divisor, uint64_t begin, uint64_t end, Source source,
                                Store store) {
  using A = typename Element<T>::Accumulator;
  constexpr uint64_t kLongest = 4096 / sizeof(A);
  A sums[kLongest];
  T results[kLongest];
  for (uint64_t i = begin; i < end; i += kLongest) {
    const uint64_t count = minimum(kLongest, end - i);
    const T* first = source(0) + i;
    for (uint64_t k = 0; k < count; ++k) sums[k] = contribution<T, Op>(first[k], divisor);
    // If T is the accumulator's type, the last rank's loop also finishes the results, which saves a pass over the run.
    // Narrower types are finished in a separate loop, because compilers do not vectorise a loop that converts in both
    // directions.
    const bool last_finishes = sizeof(T) == sizeof(A) && ranks > 1;
    for (uint32_t rank = 1; rank < ranks - last_finishes; ++rank) {
      const T* next = source(rank) + i;
      for (uint64_t k = 0; k < count; ++k) sums[k] = Op::combine(sums[k], contribution<T, Op>(next[k], divisor));
    }
    if (last_finishes) {
      const T* last = source(ranks - 1) + i;
      for (uint64_t k = 0; k < count; ++k)
        results[k] = finishReduction<T, Op>(Op::combine(sums[k], contribution<T, Op>(last[k], divisor)), divisor);
    } else {
      for (uint64_t k = 0; k < count; ++k) results[k] = finishReduction<T, Op>(sums[k], divisor);
    }
    store(i, Run<T>{results, count});
  }
}
#else
template <class T, class Op, uint32_t kCount, class Source>
PROXYCCL_DEVICE Pack<T, kCount> reducePack(uint32_t ranks, uint32_t divisor, uint64_t i, Source source) {
  using A = typename Element<T>::Accumulator;
  constexpr uint32_t kAtOnce = 4;  // number of ranks whose values are loaded together
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
        const A value = contribution<T, Op>(packs[r].values[k], divisor);
        sums[k] = first + r == 0 ? value : Op::combine(sums[k], value);
      }
    }
  }
  Pack<T, kCount> result;
  for (uint32_t k = 0; k < kCount; ++k) result.values[k] = finishReduction<T, Op>(sums[k], divisor);
  return result;
}

template <class T>
using Unit = Pack<T, 16 / sizeof(T)>;

// kInTurn loads a rank's units after the previous rank's units have arrived; kAhead loads them earlier, which keeps
// more data in flight but takes more registers.
enum class Loads { kInTurn, kAhead };

// For each u < kUnits, combines the units source(rank)(u) of all ranks, in rank order. Loaded units are kept as bytes,
// because each narrow value would otherwise take a whole register.
template <class T, class Op, uint32_t kUnits, Loads kLoads, class Source>
PROXYCCL_DEVICE void combineUnits(uint32_t ranks, uint32_t divisor, Source source, Bytes16 (&results)[kUnits]) {
  using A = typename Element<T>::Accumulator;
  constexpr uint32_t kWide = 16 / sizeof(T);
  A sums[kUnits][kWide] = {};
  Bytes16 next[kUnits];
  auto loadNext = [&](uint32_t rank) {
    const auto from = source(rank);
#pragma unroll
    for (uint32_t u = 0; u < kUnits; ++u) next[u] = __builtin_bit_cast(Bytes16, from(u));
  };
  if (kLoads == Loads::kAhead) loadNext(0);
  // The inner loops are unrolled, because an array with a variable index would be in memory instead of registers.
#pragma unroll 1
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    if (kLoads == Loads::kInTurn) loadNext(rank);
    Bytes16 units[kUnits];
#pragma unroll
    for (uint32_t u = 0; u < kUnits; ++u) units[u] = next[u];
    if (kLoads == Loads::kAhead && rank + 1 < ranks) loadNext(rank + 1);
#pragma unroll
    for (uint32_t u = 0; u < kUnits; ++u) {
      const Unit<T> unit = __builtin_bit_cast(Unit<T>, units[u]);
#pragma unroll
      for (uint32_t v = 0; v < kWide; ++v) {
        const A value = contribution<T, Op>(unit.values[v], divisor);
        sums[u][v] = rank == 0 ? value : Op::combine(sums[u][v], value);
      }
    }
  }
#pragma unroll
  for (uint32_t u = 0; u < kUnits; ++u) {
    Unit<T> result;
#pragma unroll
    for (uint32_t v = 0; v < kWide; ++v) result.values[v] = finishReduction<T, Op>(sums[u][v], divisor);
    results[u] = __builtin_bit_cast(Bytes16, result);
  }
}
#endif

// Called by each of `threads` threads: combines source(rank)[0, n) of all ranks in rank order, and calls store(i,
// values) with the results from index i on. On a GPU `values` has 16 bytes if `aligned`, else one value; on the host it
// is a Run. An average divides by `divisor`.
template <class T, class Op, class Source, class Store>
PROXYCCL_DEVICE void reduceRanks(uint32_t ranks, uint32_t divisor, uint64_t n, [[maybe_unused]] bool aligned,
                                 uint32_t thread, uint32_t threads, Source source, Store store) {
#if PROXYCCL_ON_HOST
  reduceRuns<T, Op>(ranks, divisor, n * thread / threads, n * (thread + 1) / threads, source, store);
#else
  constexpr uint32_t kWide = 16 / sizeof(T), kTogether = 2;
  const uint64_t wide = aligned ? n / kWide : 0, stride = threads;
  uint64_t i = thread;
#pragma unroll 1
  for (; i + (kTogether - 1) * stride < wide; i += kTogether * stride) {
    Bytes16 results[kTogether];
    combineUnits<T, Op, kTogether, Loads::kAhead>(
        ranks, divisor,
        [&](uint32_t rank) {
          return [=, from = source(rank)](uint32_t u) { return Unit<T>::load(from + (i + u * stride) * kWide); };
        },
        results);
#pragma unroll
    for (uint32_t u = 0; u < kTogether; ++u) store((i + u * stride) * kWide, __builtin_bit_cast(Unit<T>, results[u]));
  }
#pragma unroll 1
  for (; i < wide; i += stride) store(i * kWide, reducePack<T, Op, kWide>(ranks, divisor, i * kWide, source));
  forEach(n - wide * kWide, thread, threads,
          [&](uint64_t i) { store(wide * kWide + i, reducePack<T, Op, 1>(ranks, divisor, wide * kWide + i, source)); });
#endif
}

}  // namespace proxyccl
