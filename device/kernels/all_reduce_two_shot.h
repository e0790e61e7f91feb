// Two-shot all-reduce where all peers are mapped: each rank reduces one share of the data for all, in rank order,
// accumulated in the wide type and rounded once, and distributes the result. 2 (n-1)/n times the bytes in two
// crossings.
//
// All data that crosses a link is stored, not loaded: NVLink carries stores faster. A rank stores the part that a peer
// reduces to that peer's scratch memory, straight from its input. It stores results straight to the peers' outputs if
// all are reached (outputs.h), otherwise to their scratch memory.
//
// The grid's threads take units of 16 bytes in turn: memory and links are faster if blocks touch neighbouring addresses
// at the same time. On the host a thread's units are contiguous. A unit belongs to the same thread in every phase and
// on every rank, so a block waits only for blocks with its own number.
//
// Data that does not fit into scratch memory goes in pieces. In step k a block
//   1. waits for the peers' scattered parts of piece k, and scatters piece k + 1;
//   2. reduces piece k, and distributes the result;
//   3. waits for the peers' results of piece k - 1 in its scratch memory, and stores them to its output.
// Where results go to outputs, part 3 and its posts are skipped. Instead the ranks meet at the end.
// Each of the two kinds of data has its own PROXYCCL_PIPELINE_DEPTH buffers, used in turn. Only the following guards
// them. A rank that is about to
//   - scatter piece k + 1 has every peer's data of piece k, which the peers posted when they had reduced piece k - 2:
//     its buffer is free;
//   - distribute the results of piece k has every peer's data of piece k, which the peers posted when they had finished
//     step k - 2: they have stored the results of piece k - 3, and its buffer is free.
// An output is written when its rank's data of the same piece has arrived: its kernel runs, so earlier work no longer
// uses the array, and the kernel has read the data that an in-place result replaces.
// Across kernels, whatever their grids: a rank that starts a kernel has seen the end of all peers' steps of the
// previous one, by their results or in the last meeting, so all peers have reduced all their data. It distributes
// results only once it has every peer's first data of this kernel, which peers send after they have ended the previous
// one.
#ifndef PROXYCCL_ALL_REDUCE_TWO_SHOT_H
#define PROXYCCL_ALL_REDUCE_TWO_SHOT_H

#include "instance.h"
#include "integers.h"
#include "links.h"
#include "outputs.h"
#include "reduce_ranks.h"

namespace proxyccl {

// `count` elements in units of 16 bytes, of which the last may be short.
template <class T>
class Units {
 public:
  static constexpr uint32_t kWide = 16 / sizeof(T);
  using Unit = Pack<T, kWide>;

  PROXYCCL_DEVICE Units(T* base, uint64_t count)
      : base_(base), count_(count), whole_(isAligned16(base) ? count / kWide : 0) {}

  PROXYCCL_DEVICE uint64_t size() const { return divideUp(count_, kWide); }
  // Units below this one may be loaded and stored with one access.
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

template <class T, class Op>
class TwoShot {
 public:
  PROXYCCL_DEVICE TwoShot(const ProxycclTeam& team, const T* in, T* out, uint64_t count)
      : team_(team), in_(const_cast<T*>(in)), out_(out), count_(count), links_(team), outputs_(team) {}

  PROXYCCL_DEVICE void run() {
    outputs_.tell();
    scatter(0);
    links_.post();
    // While the data is in flight.
    const bool reached = outputs_.learn();
    // Both ends of a link count the same sequence: data 0; then in each step data k + 1 and, if they are posted,
    // results k.
    for (uint64_t k = 0; k < team_.pieces; ++k) {
      links_.await();
      if (k + 1 < team_.pieces) {
        scatter(k + 1);
        links_.post();
      }
      reduce(k, reached);
      if (reached) continue;
      links_.post();
      if (k == 0) continue;
      links_.await();
      gather(k - 1);
    }
    if (reached) links_.post();
    links_.await();
    if (!reached) gather(team_.pieces - 1);
  }

 private:
  static constexpr uint32_t kData = 0, kResult = PROXYCCL_PIPELINE_DEPTH;
  using Unit = typename Units<T>::Unit;

  PROXYCCL_DEVICE uint64_t thread() const { return static_cast<uint64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
  PROXYCCL_DEVICE uint64_t threads() const { return static_cast<uint64_t>(gridDim.x) * blockDim.x; }
  // The i-th rank after this one: each rank begins with a different peer.
  PROXYCCL_DEVICE uint32_t after(uint32_t i) const {
    const uint32_t rank = team_.rank + i;
    return rank < team_.world_size ? rank : rank - team_.world_size;
  }

#if PROXYCCL_ON_HOST
  // The first of this thread's elements of a piece, which lie side by side, in whole units. Which they are does not
  // depend on the length of a piece: the next one may come into the same buffer.
  uint64_t firstElement(uint64_t thread) const {
    return divideUp(team_.piece, Units<T>::kWide) * thread / threads() * Units<T>::kWide;
  }
#else
  // Calls several(i) for each four of this thread's units i, i + threads() … below `whole`, then one(i) for its others
  // below `end`.
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

  // Elements of piece k of a rank's share.
  PROXYCCL_DEVICE uint64_t sizeOf(uint64_t k, uint32_t owner) const {
    const uint64_t end = minimum((owner + 1) * team_.share, count_), begin = beginOf(k, owner);
    return begin < end ? minimum(team_.piece, end - begin) : 0;
  }
  PROXYCCL_DEVICE uint64_t beginOf(uint64_t k, uint32_t owner) const { return owner * team_.share + k * team_.piece; }

  // The slot for rank `of` in the buffers of rank `at`, which has slots for its peers, in rank order.
  PROXYCCL_DEVICE T* slot(uint32_t at, uint32_t kind, uint64_t k, uint32_t of) const {
    const uint32_t buffer = kind + static_cast<uint32_t>(k % PROXYCCL_PIPELINE_DEPTH);
    return reinterpret_cast<T*>((at == team_.rank ? team_.scratch : team_.remote[at]) +
                                PROXYCCL_ROUND_BUFFERS * team_.exchange_bytes + buffer * team_.pipeline_bytes +
                                (of < at ? of : of - 1) * team_.slot_bytes);
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
      copy(slot(peer, kData, k, team_.rank), in_ + beginOf(k, peer), sizeOf(k, peer));
    }
  }

  PROXYCCL_DEVICE void gather(uint64_t k) const {
    for (uint32_t i = 1; i < team_.world_size; ++i) {
      const uint32_t peer = after(i);
      copy(out_ + beginOf(k, peer), slot(team_.rank, kResult, k, peer), sizeOf(k, peer));
    }
  }

  PROXYCCL_DEVICE void reduce(uint64_t k, bool reached) const {
    const uint64_t begin = beginOf(k, team_.rank), count = sizeOf(k, team_.rank);
    // To each rank, this one last.
    auto target = [&](uint32_t rank) {
      if (reached) return reinterpret_cast<T*>(outputs_.of(rank)) + begin;
      return rank == team_.rank ? out_ + begin : slot(rank, kResult, k, team_.rank);
    };
#if PROXYCCL_ON_HOST
    reduceRuns<T, Op>(
        team_.world_size, team_.divisor, firstElement(thread()), minimum(firstElement(thread() + 1), count),
        [&](uint32_t rank) { return rank == team_.rank ? in_ + begin : slot(team_.rank, kData, k, rank); },
        [&](uint64_t i, const Run<T>& sums) {
          for (uint32_t n = 1; n <= team_.world_size; ++n)
            sums.store(target(n == team_.world_size ? team_.rank : after(n)) + i);
        });
#else
    const Units<T> mine(in_ + begin, count);
    const uint64_t stride = threads();
    uint64_t whole = mine.whole();
    for (uint32_t rank = 0; rank < team_.world_size; ++rank)
      if (!isAligned16(target(rank))) whole = 0;
    auto source = [&](uint32_t rank) {
      return rank == team_.rank ? mine : Units<T>(slot(team_.rank, kData, k, rank), count);
    };
    forUnits(
        whole, mine.size(),
        [&](uint64_t i) {
          reduceUnits<4>(
              [&](uint32_t rank) {
                return [=, from = source(rank)](uint32_t u) { return from.loadWhole(i + u * stride); };
              },
              [&](uint32_t rank, uint32_t u, const Unit& sum) {
                sum.store(target(rank) + (i + u * stride) * Units<T>::kWide);
              });
        },
        [&](uint64_t i) {
          reduceUnits<1>(
              [&](uint32_t rank) { return [=, from = source(rank)](uint32_t) { return from.load(i); }; },
              [&](uint32_t rank, uint32_t, const Unit& sum) { Units<T>(target(rank), count).store(i, sum); });
        });
#endif
  }

#if !PROXYCCL_ON_HOST
  // Combines kUnits units source(rank)(u) of all ranks, in rank order, and calls store(rank, u, sum) for each rank,
  // this one last.
  template <uint32_t kUnits, class Source, class Store>
  PROXYCCL_DEVICE void reduceUnits(Source source, Store store) const {
    Bytes16 results[kUnits];
    combineUnits<T, Op, kUnits, Loads::kInTurn>(team_.world_size, team_.divisor, source, results);
#pragma unroll 1
    for (uint32_t i = 1; i <= team_.world_size; ++i) {
#pragma unroll
      for (uint32_t u = 0; u < kUnits; ++u)
        store(i == team_.world_size ? team_.rank : after(i), u, __builtin_bit_cast(Unit, results[u]));
    }
  }
#endif

  const ProxycclTeam& team_;
  T* in_;  // only read
  T* out_;
  uint64_t count_;
  Links links_;
  Outputs outputs_;
};

template <class T, class Op>
PROXYCCL_DEVICE void all_reduce_two_shot(const ProxycclTeam& team, const T* in, T* out, uint64_t count) {
  TwoShot<T, Op>(team, in, out, count).run();
}

}  // namespace proxyccl

#endif
