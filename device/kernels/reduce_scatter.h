// reduce_scatter: each rank gets one share of the reduction, in one crossing.
//
// Every rank stores the part that a peer reduces to that peer's scratch memory, straight from its input. It reduces in
// rank order straight into its output.
#ifndef PROXYCCL_REDUCE_SCATTER_H
#define PROXYCCL_REDUCE_SCATTER_H

#include "exchange.h"
#include "instance.h"
#include "reduce_ranks.h"

namespace proxyccl {

// `count` elements per rank: in holds world_size * count, out count.
template <class T, class Op>
PROXYCCL_DEVICE void reduce_scatter(const ProxycclTeam& team, const T* in, T* out, uint64_t count) {
  Exchange exchange(team);
  const Lane& lane = exchange.lane();
  const uint32_t rank = team.rank, ranks = team.world_size;
  exchange.forEachRound(
      count, sizeof(T),
      [&](uint64_t offset, uint64_t n) {
        for (uint32_t i = 1; i < ranks; ++i) {
          const uint32_t peer = (rank + i) % ranks;
          exchange.send(peer, in + peer * count + offset, n * sizeof(T));
        }
      },
      [&](uint64_t offset, uint64_t n) {
        const T* mine = in + rank * count + offset;
        T* result = out + offset;
        reduceRanks<T, Op>(
            ranks, team.divisor, n, isAligned16(mine) && isAligned16(result), lane.thread(), lane.threads(),
            [&](uint32_t source) { return source == rank ? mine : reinterpret_cast<const T*>(exchange.inbox(source)); },
            [&](uint64_t i, const auto& sum) { sum.store(result + i); });
      });
  exchange.finish();
}

}  // namespace proxyccl

#endif
