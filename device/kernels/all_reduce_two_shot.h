// Two-shot all-reduce where all peers are mapped: each rank reduces one share of the data for all
// (scattered_reduction.h), and distributes the result. A rank sends 2 (n-1)/n times the bytes, and the data crosses
// links twice. Results go straight to the peers' outputs if all are reached (outputs.h), otherwise to their scratch
// memory.
//
// If the all-reduce is in place, short, and all ranks offer their arrays, ranks load the data from their peers' arrays.
// Nothing is stored before the loads, so the ranks need no fence when they meet; a fence takes longer than the loads. A
// share is read only by the rank that reduces it and then overwrites it. If a rank has offered its input but another
// rank has not, the rank scatters after all, and its peers await one more post.
//
// Otherwise a rank scatters. Data that does not fit into scratch memory goes in pieces. In step k a block
//   1. waits for the peers' scattered parts of piece k, and scatters piece k + 1;
//   2. reduces piece k, and distributes the result;
//   3. waits for the peers' results of piece k - 1 in its scratch memory, and stores them to its output.
// Where results go to outputs, part 3 and its posts are skipped. Instead the ranks meet at the end. Each of the two
// kinds of data has its own PROXYCCL_PIPELINE_DEPTH buffers, used in turn. No flag guards them; the order of the steps
// does. A rank that is about to
//   - scatter piece k + 1 has every peer's data of piece k, which the peers posted when they had reduced piece k - 2:
//     its buffer is free;
//   - distribute the results of piece k has every peer's data of piece k, which the peers posted when they had finished
//     step k - 2: they have stored the results of piece k - 3, and its buffer is free.
// A rank's output is written when the rank's data of the same piece has arrived: then its kernel runs, so earlier work
// no longer uses the array, and the kernel has read the data that an in-place result replaces. The same holds across
// kernels, whatever their grids: a rank that starts a kernel has seen the end of all peers' steps of the previous one,
// by their results or in the last meeting, so all peers have reduced all their data. The rank distributes results only
// once it has every peer's first data of this kernel, which peers send after they have ended the previous one.
#pragma once

#include "outputs.h"
#include "scattered_reduction.h"

namespace proxyccl {

template <class T, class Op>
class TwoShot : ScatteredReduction<T, Op> {
 public:
  PROXYCCL_DEVICE TwoShot(const ProxycclTeam& team, const T* in, T* out, uint64_t count)
      : ScatteredReduction<T, Op>(team, in, count), out_(out), outputs_(team) {}

  PROXYCCL_DEVICE void run() {
    const bool offers = team_.offers != 0;
    outputs_.tell(offers);
    if (offers) {
      links_.postLoads();
    } else {
      scatter(0);
      links_.post();
    }
    // Learns the peers' outputs while the data is in flight.
    const bool reached = outputs_.learn();
    if (offers && outputs_.peersOffer()) return loadAndReduce();
    if (offers) {
      scatter(0);
      links_.post();
    }
    if (outputs_.handlesOffer()) links_.awaitOne();
    // Both ends of a link count the same sequence of posts: first the data of piece 0; then in step k the data of piece
    // k + 1 and, if results are posted, the results of piece k.
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
  using Base = ScatteredReduction<T, Op>;
  using Base::after, Base::beginOf, Base::copy, Base::count_, Base::links_, Base::scatter, Base::sizeOf, Base::slot,
      Base::team_, Base::thread, Base::threads;
  static constexpr uint32_t kResult = PROXYCCL_PIPELINE_DEPTH;

  PROXYCCL_DEVICE void loadAndReduce() const {
    links_.await();
    const uint64_t begin = minimum(team_.rank * team_.share, count_), count = minimum(team_.share, count_ - begin);
    auto array = [&](uint32_t rank) { return reinterpret_cast<T*>(outputs_.of(rank)) + begin; };
    auto store = [&](uint64_t i, const auto& sum) {
#pragma unroll 1
      for (uint32_t n = 1; n <= team_.world_size; ++n)
        sum.store(array(n == team_.world_size ? team_.rank : after(n)) + i);
    };
#if PROXYCCL_ON_HOST
    reduceRuns<T, Op>(team_.world_size, team_.divisor, count * thread() / threads(), count * (thread() + 1) / threads(),
                      array, store);
#else
    // A thread handles one unit at a time, but loads it from several ranks concurrently: units are few, and each load
    // crosses a link.
    constexpr uint32_t kWide = Units<T>::kWide;
    const uint64_t whole = count / kWide * kWide;
#pragma unroll 1
    for (uint64_t i = thread() * kWide; i < whole; i += threads() * kWide)
      store(i, reducePack<T, Op, kWide>(team_.world_size, team_.divisor, i, array));
    for (uint64_t i = whole + thread(); i < count; i += threads())
      store(i, reducePack<T, Op, 1>(team_.world_size, team_.divisor, i, array));
#endif
    links_.post();
    links_.await();
  }

  PROXYCCL_DEVICE void gather(uint64_t k) const {
    for (uint32_t i = 1; i < team_.world_size; ++i) {
      const uint32_t peer = after(i);
      copy(out_ + beginOf(k, peer), slot(team_.rank, kResult, k, peer), sizeOf(k, peer));
    }
  }

  PROXYCCL_DEVICE void reduce(uint64_t k, bool reached) const {
    const uint64_t begin = beginOf(k, team_.rank);
    Base::reduce(k, false, [&](uint32_t rank) {
      if (reached) return reinterpret_cast<T*>(outputs_.of(rank)) + begin;
      return rank == team_.rank ? out_ + begin : slot(rank, kResult, k, team_.rank);
    });
  }

  T* out_;
  Outputs outputs_;
};

template <class T, class Op>
PROXYCCL_DEVICE void all_reduce_two_shot(const ProxycclTeam& team, const T* in, T* out, uint64_t count) {
  TwoShot<T, Op>(team, in, out, count).run();
}

}  // namespace proxyccl
