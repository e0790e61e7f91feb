// Reductions in pieces between ranks that map each other's memory. For each piece, every rank copies each peer's part
// from its own input to that peer's scratch memory. Each rank then reduces its own share in rank order, in the
// accumulator's type, and rounds once.
//
// Data crosses links by stores instead of loads, because NVLink carries stores faster than loads.
//
// On a GPU, thread t of the grid's N threads handles the 16-byte units t, t + N, …, because memory and links are faster
// if blocks access neighbouring addresses at the same time. On the host a thread's units are contiguous. The same
// thread number handles a unit in every phase and on every rank, so a block waits only for blocks with its own number.
#pragma once

#include "exchange.h"
#include "instance.h"
#include "integers.h"
#include "links.h"
#include "reduce_ranks.h"

namespace proxyccl {

// An array of `count` elements in units of 16 bytes; the last unit may be short.
template <class T>
class Units {
 public:
  static constexpr uint32_t kWide = 16 / sizeof(T);
  using Unit = Pack<T, kWide>;

  PROXYCCL_DEVICE Units(T* base, uint64_t count)
      : base_(base), count_(count), whole_(isAligned16(base) ? count / kWide : 0) {}

  PROXYCCL_DEVICE uint64_t size() const { return divideUp(count_, kWide); }
  // Returns the number of units, from unit 0 on, that one access can load or store.
  PROXYCCL_DEVICE uint64_t whole() const { return whole_; }

  PROXYCCL_DEVICE Unit loadWhole(uint64_t i) const { return Unit::load(base_ + i * kWide); }
  PROXYCCL_DEVICE void storeWhole(uint64_t i, const Unit& unit) const { unit.store(base_ + i * kWide); }
  PROXYCCL_DEVICE Unit load(uint64_t i) const {
    if (i < whole_) return loadWhole(i);
    Unit unit{};
    for (uint32_t k = 0; k < kWide && i * kWide + k < count_; ++k) unit.values[k] = base_[i * kWide + k];
    return unit;
  }
  PROXYCCL_DEVICE void store(uint64_t i, const Unit& unit) const {
    if (i < whole_) return storeWhole(i, unit);
    for (uint32_t k = 0; k < kWide && i * kWide + k < count_; ++k) base_[i * kWide + k] = unit.values[k];
  }

 private:
  T* base_;
  uint64_t count_, whole_;
};

// Scatters and reduces team.pieces pieces, of at most team.piece elements of each rank's team.share elements.
template <class T, class Op>
class ScatteredReduction {
 public:
  PROXYCCL_DEVICE ScatteredReduction(const ProxycclTeam& team, const T* in, uint64_t count)
      : team_(team), in_(const_cast<T*>(in)), count_(count), links_(team) {}

 protected:
  using Unit = typename Units<T>::Unit;

  PROXYCCL_DEVICE uint64_t thread() const { return static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
  PROXYCCL_DEVICE uint64_t threads() const { return static_cast<uint64_t>(gridDim.x) * blockDim.x; }
  // Returns the i-th rank after this one, so that each rank begins with a different peer.
  PROXYCCL_DEVICE uint32_t after(uint32_t i) const {
    const uint32_t rank = team_.rank + i;
    return rank < team_.world_size ? rank : rank - team_.world_size;
  }

#if PROXYCCL_ON_HOST
  // Returns the index of a thread's first element of a piece. The thread's elements are contiguous, in whole units. The
  // index does not depend on the piece's length, because pieces of different lengths use the same buffer.
  uint64_t firstElement(uint64_t thread) const {
    return divideUp(team_.piece, Units<T>::kWide) * thread / threads() * Units<T>::kWide;
  }
#else
  // Calls several(i) for each group of four units of this thread, i to i + 3 * threads(), that are below `whole`, then
  // one(i) for each of the thread's other units below `end`.
  template <class Several, class One>
  PROXYCCL_DEVICE void forUnits(uint64_t whole, uint64_t end, Several several, One one) const {
    const uint64_t stride = threads();
    uint64_t i = thread();
#pragma unroll 1
    for (; i + 3 * stride < whole; i += 4 * stride) several(i);
#pragma unroll 1
    for (; i < end; i += stride) one(i);
  }
#endif

  PROXYCCL_DEVICE uint64_t sizeOf(uint64_t k, uint32_t owner) const {
    const uint64_t end = minimum((owner + 1) * team_.share, count_), begin = beginOf(k, owner);
    return begin < end ? minimum(team_.piece, end - begin) : 0;
  }
  PROXYCCL_DEVICE uint64_t beginOf(uint64_t k, uint32_t owner) const { return owner * team_.share + k * team_.piece; }

  // Returns the address of the slot for rank `of` of a buffer, in the scratch memory of rank `at`.
  PROXYCCL_DEVICE T* slot(uint32_t at, uint32_t buffer, uint32_t of) const {
    return reinterpret_cast<T*>((at == team_.rank ? team_.scratch : team_.remote[at]) + bufferOffset(team_, buffer) +
                                slotOf(at, of) * team_.slot_bytes);
  }

  PROXYCCL_DEVICE void copy(T* to, T* from, uint64_t count) const {
#if PROXYCCL_ON_HOST
    const uint64_t begin = firstElement(thread()), end = minimum(firstElement(thread() + 1), count);
    if (begin < end) proxyccl_memmove(to + begin, from + begin, (end - begin) * sizeof(T));
#else
    const Units<T> target(to, count), source(from, count);
    const uint64_t stride = threads();
    forUnits(
        minimum(target.whole(), source.whole()), source.size(),
        [&](uint64_t i) {
          Unit units[4];
#pragma unroll
          for (uint32_t u = 0; u < 4; ++u) units[u] = source.loadWhole(i + u * stride);
#pragma unroll
          for (uint32_t u = 0; u < 4; ++u) target.storeWhole(i + u * stride, units[u]);
        },
        [&](uint64_t i) { target.store(i, source.load(i)); });
#endif
  }

  PROXYCCL_DEVICE void scatter(uint64_t k) const {
    for (uint32_t i = 1; i < team_.world_size; ++i) {
      const uint32_t peer = after(i);
      copy(slot(peer, dataBuffer(k), team_.rank), in_ + beginOf(k, peer), sizeOf(k, peer));
    }
  }

  // Reduces this rank's part of piece k, and stores the result at target(rank) for each rank, this rank last. If
  // `alone`, stores only for this rank.
  template <class Target>
  PROXYCCL_DEVICE void reduce(uint64_t k, bool alone, Target target) const {
    const uint64_t begin = beginOf(k, team_.rank), count = sizeOf(k, team_.rank);
    const uint32_t first = alone ? team_.world_size : 1;
#if PROXYCCL_ON_HOST
    reduceRuns<T, Op>(
        team_.world_size, team_.divisor, firstElement(thread()), minimum(firstElement(thread() + 1), count),
        [&](uint32_t rank) { return rank == team_.rank ? in_ + begin : slot(team_.rank, dataBuffer(k), rank); },
        [&](uint64_t i, const Run<T>& sums) {
          for (uint32_t n = first; n <= team_.world_size; ++n)
            sums.store(target(n == team_.world_size ? team_.rank : after(n)) + i);
        });
#else
    const Units<T> mine(in_ + begin, count);
    const uint64_t stride = threads();
    uint64_t whole = mine.whole();
    for (uint32_t n = first; n <= team_.world_size; ++n)
      if (!isAligned16(target(n == team_.world_size ? team_.rank : after(n)))) whole = 0;
    auto source = [&](uint32_t rank) {
      return rank == team_.rank ? mine : Units<T>(slot(team_.rank, dataBuffer(k), rank), count);
    };
    forUnits(
        whole, mine.size(),
        [&](uint64_t i) {
          reduceUnits<4>(
              first,
              [&](uint32_t rank) {
                return [=, from = source(rank)](uint32_t u) { return from.loadWhole(i + u * stride); };
              },
              [&](uint32_t rank, uint32_t u, const Unit& sum) {
                sum.store(target(rank) + (i + u * stride) * Units<T>::kWide);
              });
        },
        [&](uint64_t i) {
          reduceUnits<1>(
              first, [&](uint32_t rank) { return [=, from = source(rank)](uint32_t) { return from.load(i); }; },
              [&](uint32_t rank, uint32_t, const Unit& sum) { Units<T>(target(rank), count).store(i, sum); });
        });
#endif
  }

#if !PROXYCCL_ON_HOST
  // Combines kUnits units source(rank)(u) of all ranks, in rank order. Calls store(rank, u, sum) for each rank from
  // after(first) on, and last for this rank.
  template <uint32_t kUnits, class Source, class Store>
  PROXYCCL_DEVICE void reduceUnits(uint32_t first, Source source, Store store) const {
    Bytes16 results[kUnits];
    combineUnits<T, Op, kUnits, Loads::kInTurn>(team_.world_size, team_.divisor, source, results);
#pragma unroll 1
    for (uint32_t i = first; i <= team_.world_size; ++i) {
#pragma unroll
      for (uint32_t u = 0; u < kUnits; ++u)
        store(i == team_.world_size ? team_.rank : after(i), u, __builtin_bit_cast(Unit, results[u]));
    }
  }
#endif

  const ProxycclTeam& team_;
  T* in_;  // only read
  uint64_t count_;
  Links links_;
};

}  // namespace proxyccl
