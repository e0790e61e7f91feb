// reduce_scatter: each rank gets one share of the reduced data.
//
// Every rank copies each peer's share from its own input to the peer's scratch memory. The peer reduces its share in
// rank order, into its output. A short call is divided into rounds (exchange.h), a long call into pieces
// (scattered_reduction.h). A call in pieces needs fewer blocks than a call in rounds, but one more synchronization at
// the end.
//
// With pieces, a rank scatters piece k + 1 when it has every peer's data of piece k, which the peers sent after they
// had reduced piece k - 2. So the next of the PROXYCCL_PIPELINE_DEPTH buffers, which are used in turn, is free. After
// the last synchronization all ranks have reduced all pieces, so the next kernel may use the buffers.
#pragma once

#include "exchange.h"
#include "scattered_reduction.h"

namespace proxyccl {

template <class T, class Op>
class ReduceScatterInPieces : ScatteredReduction<T, Op> {
 public:
  PROXYCCL_DEVICE ReduceScatterInPieces(const ProxycclTeam& team, const T* in, T* out)
      : Base(team, in, team.share * team.world_size), out_(out) {}

  PROXYCCL_DEVICE void run() const {
    scatter(0);
    links_.post();
    for (uint64_t k = 0; k < team_.pieces; ++k) {
      links_.await();
      if (k + 1 < team_.pieces) {
        scatter(k + 1);
        links_.post();
      }
      Base::reduce(k, true, [&](uint32_t) { return out_ + k * team_.piece; });
    }
    links_.post();
    links_.await();
  }

 private:
  using Base = ScatteredReduction<T, Op>;
  using Base::links_, Base::scatter, Base::team_;

  T* out_;
};

// Every rank sends every peer `count` elements, in rounds (exchange.h), and reduces what it receives, in rank order,
// into `out`. The elements for rank p begin at in + p * stride. With a stride of 0, all ranks reduce the same elements,
// so all get the whole result after the data has crossed the links once.
template <class T, class Op>
PROXYCCL_DEVICE void reduceInRounds(const ProxycclTeam& team, const T* in, uint64_t stride, T* out, uint64_t count) {
  Exchange exchange(team);
  const Lane& lane = exchange.lane();
  const uint32_t rank = team.rank, ranks = team.world_size;
  exchange.forEachRound(
      count, sizeof(T),
      [&](uint64_t offset, uint64_t n) {
        for (uint32_t i = 1; i < ranks; ++i) {
          const uint32_t peer = (rank + i) % ranks;
          exchange.send(peer, in + peer * stride + offset, n * sizeof(T));
        }
      },
      [&](uint64_t offset, uint64_t n) {
        const T* mine = in + rank * stride + offset;
        T* result = out + offset;
        reduceRanks<T, Op>(
            ranks, team.divisor, n, isAligned16(mine) && isAligned16(result), lane.thread(), lane.threads(),
            [&](uint32_t source) { return source == rank ? mine : reinterpret_cast<const T*>(exchange.inbox(source)); },
            [&](uint64_t i, const auto& sum) { sum.store(result + i); });
      });
  exchange.finish();
}

// `count` is the number of elements per rank: `in` has world_size * count elements, `out` has count. If team.pieces is
// not 0, the call is divided into pieces, and team.share is `count`.
template <class T, class Op>
PROXYCCL_DEVICE void reduce_scatter(const ProxycclTeam& team, const T* in, T* out, uint64_t count) {
  if (team.pieces != 0) return ReduceScatterInPieces<T, Op>(team, in, out).run();
  reduceInRounds<T, Op>(team, in, count, out, count);
}

}  // namespace proxyccl
