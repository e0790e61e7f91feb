// Two-shot all-reduce between ranks that map each other's memory: each of the n ranks reduces one share of the data
// (scattered_reduction.h), and sends the result to all ranks. A rank sends 2 (n-1)/n times the array's bytes, and each
// element crosses links twice. If all ranks' outputs are mapped (outputs.h), results go straight to the outputs,
// otherwise to the peers' scratch memory.
//
// If the all-reduce is in place and short, and every rank allows its peers to load from its array (the rank offers the
// array), ranks load the data from their peers' arrays. The kernel stores nothing before these loads, so the signals
// before the loads need no fence. A fence would take longer than the loads. In-place results are safe, because only the
// rank that reduces a share reads this share, and overwrites it afterwards. If only some ranks offer their arrays, all
// ranks scatter; a rank that offered has already posted once, so its peers wait for one more post.
//
// In all other cases each rank scatters its data through scratch memory, in pieces if the data does not fit. In step k
// a block
//   1. waits for the peers' scattered parts of piece k, and scatters piece k + 1;
//   2. reduces piece k, and distributes the result;
//   3. waits for the peers' results of piece k - 1 in its scratch memory, and copies them to its output.
//
// If results go straight to outputs, item 3 and the posts of results are skipped, and all ranks synchronize at the end.
// Scattered parts and results each have PROXYCCL_PIPELINE_DEPTH buffers, used in turn. The order of the steps
// guarantees, without flags, that a buffer is free when a rank writes to it:
//   - A rank that is about to scatter piece k + 1 has every peer's data of piece k, which the peers posted after they
//     had reduced piece k - 2. So the buffer of piece k - 2 is free.
//   - A rank that is about to distribute the results of piece k has every peer's data of piece k, which the peers
//     posted after step k - 2. So the peers have stored the results of piece k - 3, and their buffer is free.
//
// A peer writes a piece to a rank's output only after the rank's own data of the piece has arrived: by then the rank's
// kernel runs, so earlier work no longer uses the output, and the kernel has read the input that an in-place result
// replaces. A buffer is also free when the next kernel uses it, whatever the kernels' grids: when a rank starts a
// kernel, the peers' results or the final synchronization of the previous kernel have shown that all peers have reduced
// their data. The rank distributes results only when it has every peer's first data of this kernel, which a peer sends
// after it has ended the previous kernel.
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
    // The addresses of the peers' outputs arrive while the data is in flight.
    const bool reached = outputs_.learn();
    if (offers && outputs_.peersOffer()) return loadAndReduce();
    if (offers) {
      scatter(0);
      links_.post();
    }
    if (outputs_.handlesOffer()) links_.awaitOne();
    // Each rank posts first the data of piece 0, then in step k the data of piece k + 1 and the results of piece k, if
    // results are posted. Every peer waits for these posts in the same order.
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
    // A thread handles one unit at a time, because there are few units per thread, but loads the unit's values from
    // several ranks concurrently, because each load crosses a link.
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
      copy(out_ + beginOf(k, peer), slot(team_.rank, resultBuffer(k), peer), sizeOf(k, peer));
    }
  }

  PROXYCCL_DEVICE void reduce(uint64_t k, bool reached) const {
    const uint64_t begin = beginOf(k, team_.rank);
    Base::reduce(k, false, [&](uint32_t rank) {
      if (reached) return reinterpret_cast<T*>(outputs_.of(rank)) + begin;
      return rank == team_.rank ? out_ + begin : slot(rank, resultBuffer(k), team_.rank);
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
