// Two-shot all-reduce: each rank reduces one share of the data for all, then hands the result round. And
// reduce_scatter, its first half.
//
// 2 (n-1)/n times the bytes in two rounds. A share is reduced by one rank, in rank order, accumulated in the wide
// type and rounded once. Peers that are not mapped are reached through the proxy; with a team whose links are all
// proxied, only triggers move data.
#ifndef PROXYCCL_ALL_REDUCE_TWO_SHOT_H
#define PROXYCCL_ALL_REDUCE_TWO_SHOT_H

#include "exchange.h"
#include "instance.h"

namespace proxyccl {

// out[i] = the combination of mine[i] and every inbox's [i], in rank order.
template <class T, class Op>
PROXYCCL_DEVICE void reduceInboxes(ProxycclTeam* team, const Exchange& exchange, const T* mine, T* out, uint64_t n) {
  using A = typename Element<T>::Accumulator;
  const uint32_t rank = team->rank, ranks = team->world_size;
  auto of = [&](uint32_t source) { return source == rank ? mine : reinterpret_cast<const T*>(exchange.inbox(source)); };
  forEach(n, threadIdx.x, blockDim.x, [&](uint64_t i) {
    A sum = Element<T>::widen(of(0)[i]);
    for (uint32_t source = 1; source < ranks; ++source) sum = Op::combine(sum, Element<T>::widen(of(source)[i]));
    out[i] = Element<T>::narrow(Op::finish(sum, ranks));
  });
}

// `count` elements a rank: in holds world_size * count, out count.
template <class T, class Op>
PROXYCCL_DEVICE void reduce_scatter(ProxycclTeam* team, const T* in, T* out, uint64_t count) {
  Exchange exchange(team);
  const uint32_t rank = team->rank, ranks = team->world_size;
  forEachPiece(count, exchange.slotBytes() / sizeof(T), [&](uint64_t offset, uint64_t n) {
    for (uint32_t i = 1; i < ranks; ++i) {
      const uint32_t peer = (rank + i) % ranks;
      exchange.send(peer, in + peer * count + offset, n * sizeof(T));
    }
    exchange.swap();
    reduceInboxes<T, Op>(team, exchange, in + rank * count + offset, out + offset, n);
  });
  exchange.finish();
}

template <class T, class Op>
PROXYCCL_DEVICE void all_reduce_two_shot(ProxycclTeam* team, const T* in, T* out, uint64_t count) {
  constexpr uint64_t kAligned = 16 / sizeof(T);  // shares start on 16 bytes where the array does
  Exchange exchange(team);
  const uint32_t rank = team->rank, ranks = team->world_size;
  const uint64_t share = ((count + ranks - 1) / ranks + kAligned - 1) / kAligned * kAligned;
  forEachPiece(share, exchange.slotBytes() / sizeof(T), [&](uint64_t offset, uint64_t length) {
    auto begin = [&](uint32_t owner) { return minimum(owner * share + offset, count); };
    auto size = [&](uint32_t owner) { return minimum(length, count - begin(owner)); };
    for (uint32_t i = 1; i < ranks; ++i) {
      const uint32_t peer = (rank + i) % ranks;
      exchange.send(peer, in + begin(peer), size(peer) * sizeof(T));
    }
    exchange.swap();
    reduceInboxes<T, Op>(team, exchange, in + begin(rank), out + begin(rank), size(rank));
    __syncthreads();
    for (uint32_t i = 1; i < ranks; ++i) exchange.send((rank + i) % ranks, out + begin(rank), size(rank) * sizeof(T));
    exchange.swap();
    for (uint32_t i = 1; i < ranks; ++i) {
      const uint32_t peer = (rank + i) % ranks;
      copyBytes(out + begin(peer), exchange.inbox(peer), size(peer) * sizeof(T), threadIdx.x, blockDim.x);
    }
  });
  exchange.finish();
}

}  // namespace proxyccl

#endif
