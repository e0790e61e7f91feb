// Two-shot all-reduce: each rank reduces one share of the data for all, then hands the result round. And
// reduce_scatter, its first half.
//
// 2 (n-1)/n times the bytes in two crossings. A share is reduced by one rank, in rank order, accumulated in the wide
// type and rounded once. Peers that are not mapped are reached through the proxy; with a team whose links are all
// proxied, only triggers move data.
//
// The links are kept busy by a pipeline over pieces. In step k a lane
//   1. scatters piece k + 1: to each peer what that is to reduce;
//   2. waits for what the peers scattered of piece k, reduces it, and hands the result round;
//   3. waits for the peers' results of piece k - 1, and stores them.
// Each of the two kinds of data has PROXYCCL_PIPELINE_DEPTH buffers of its own, taken in turn, and nothing guards them
// but this. A rank that is about to
//   - scatter piece k + 1 has finished step k - 1, so it has every peer's results of piece k - 2: those have reduced
//   it,
//     and its buffer is free;
//   - hand round the results of piece k has every peer's data of piece k, which those scattered after they had finished
//     step k - 2: they have stored the results of piece k - 3, and its buffer is free.
// What the proxy is to send is staged in buffers that are taken likewise: data that has arrived has been read.
// From one kernel to the next, whatever the grid of each: a rank that starts one has seen all results of the one
// before, so all peers have reduced all their data; and it hands no results round before it has every peer's first data
// of this kernel, which those send when they have ended the one before.
#ifndef PROXYCCL_ALL_REDUCE_TWO_SHOT_H
#define PROXYCCL_ALL_REDUCE_TWO_SHOT_H

#include "exchange.h"
#include "instance.h"
#include "reduce_ranks.h"

namespace proxyccl {

PROXYCCL_DEVICE bool isAligned16(const void* a, const void* b) {
  return (reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b)) % 16 == 0;
}

// `count` elements a rank: in holds world_size * count, out count.
template <class T, class Op>
PROXYCCL_DEVICE void reduce_scatter(ProxycclTeam* team, const T* in, T* out, uint64_t count) {
  Exchange exchange(team);
  const Lane& lane = exchange.lane();
  const uint32_t rank = team->rank, ranks = team->world_size;
  exchange.forEachPiece(count, sizeof(T), [&](uint64_t offset, uint64_t n) {
    for (uint32_t i = 1; i < ranks; ++i) {
      const uint32_t peer = (rank + i) % ranks;
      exchange.send(peer, in + peer * count + offset, n * sizeof(T));
    }
    exchange.swap();
    const T* mine = in + rank * count + offset;
    T* result = out + offset;
    reduceRanks<T, Op>(
        ranks, team->divisor, n, isAligned16(mine, result), lane.thread(), lane.threads(),
        [&](uint32_t source) { return source == rank ? mine : reinterpret_cast<const T*>(exchange.inbox(source)); },
        [&](uint64_t i, const auto& sum) { sum.store(result + i); });
  });
  exchange.finish();
}

// In one crossing, (n-1) times the bytes: for what is so short that crossings count, over links with no packets.
template <class T, class Op>
PROXYCCL_DEVICE void allReduceInOneRound(ProxycclTeam* team, const T* in, T* out, uint64_t count) {
  Exchange exchange(team);
  const Lane& lane = exchange.lane();
  const uint32_t rank = team->rank, ranks = team->world_size;
  for (uint32_t i = 1; i < ranks; ++i) exchange.send((rank + i) % ranks, in, count * sizeof(T));
  exchange.swap();
  reduceRanks<T, Op>(
      ranks, team->divisor, count, isAligned16(in, out), lane.thread(), lane.threads(),
      [&](uint32_t source) { return source == rank ? in : reinterpret_cast<const T*>(exchange.inbox(source)); },
      [&](uint64_t i, const auto& sum) { sum.store(out + i); });
  exchange.finish();
}

template <class T, class Op>
PROXYCCL_DEVICE void allReduceInPieces(ProxycclTeam* team, const T* in, T* out, uint64_t count) {
  constexpr uint64_t kAligned = 16 / sizeof(T);  // shares and pieces start on 16 bytes where the array does
  constexpr uint64_t kPieces = 4;                // even a message that fits at once is cut, so that its parts overlap
  constexpr uint32_t kData = PROXYCCL_ROUND_BUFFERS, kResult = kData + PROXYCCL_PIPELINE_DEPTH;
  const Lane lane(team, team->world_size);
  const uint32_t rank = team->rank, ranks = team->world_size;
  const uint64_t share = divideUp(divideUp(count, ranks), kAligned) * kAligned;
  const uint64_t even = divideUp(divideUp(share, kPieces * lane.count()), kAligned) * kAligned;
  const uint64_t shortest = team->shortest_piece / sizeof(T);
  const uint64_t piece = minimum(lane.slotBytes() / sizeof(T), even < shortest ? shortest : even);
  const uint64_t pieces = divideUp(share, piece * lane.count());

  // This lane's k-th piece of a rank's share; the last ones may be short or empty.
  auto begin = [&](uint64_t k, uint32_t owner) {
    return minimum(owner * share + minimum((k * lane.count() + lane.number()) * piece, share), count);
  };
  auto size = [&](uint64_t k, uint32_t owner) {
    const uint64_t end = minimum(owner * share + minimum((k * lane.count() + lane.number() + 1) * piece, share), count);
    return end - begin(k, owner);
  };
  auto buffer = [](uint32_t kind, uint64_t k) { return kind + static_cast<uint32_t>(k % PROXYCCL_PIPELINE_DEPTH); };
  auto outbox = [&](uint32_t kind, uint64_t k, uint32_t peer) {
    return lane.outbox(buffer(kind, k), peer, rank, peer);
  };
  auto inbox = [&](uint32_t kind, uint64_t k, uint32_t peer) { return lane.inbox(buffer(kind, k), peer); };

  auto scatter = [&](uint64_t k) {
    for (uint32_t i = 1; i < ranks; ++i) {
      const uint32_t peer = (rank + i) % ranks;
      copyBytes(outbox(kData, k, peer), in + begin(k, peer), size(k, peer) * sizeof(T), lane.thread(), lane.threads());
    }
  };
  auto reduce = [&](uint64_t k) {
    const T* mine = in + begin(k, rank);
    T* result = out + begin(k, rank);
    reduceRanks<T, Op>(
        ranks, team->divisor, size(k, rank), isAligned16(mine, result), lane.thread(), lane.threads(),
        [&](uint32_t source) { return source == rank ? mine : reinterpret_cast<const T*>(inbox(kData, k, source)); },
        [&](uint64_t i, const auto& sum) {
          for (uint32_t peer = rank + 1; peer < ranks; ++peer)
            sum.store(reinterpret_cast<T*>(outbox(kResult, k, peer)) + i);
          for (uint32_t peer = 0; peer < rank; ++peer) sum.store(reinterpret_cast<T*>(outbox(kResult, k, peer)) + i);
          sum.store(result + i);
        });
  };
  auto gather = [&](uint64_t k) {
    for (uint32_t i = 1; i < ranks; ++i) {
      const uint32_t peer = (rank + i) % ranks;
      copyBytes(out + begin(k, peer), inbox(kResult, k, peer), size(k, peer) * sizeof(T), lane.thread(),
                lane.threads());
    }
  };

  const uint32_t peer = threadIdx.x;
  const bool talks = lane.talksTo(peer);
  auto post = [&](uint32_t kind, uint64_t k, uint32_t owner) {
    if (talks) lane.post(buffer(kind, k), peer, rank, peer, size(k, owner) * sizeof(T));
  };
  auto await = [&] {
    if (talks) lane.await(peer);
  };
  scatter(0);
  lane.meetBeforePost();
  post(kData, 0, peer);
  // Both ends of a link count the same sequence: data 0; then in each step data k + 1, results k.
  for (uint64_t k = 0; k <= pieces; ++k) {
    if (k + 1 < pieces) scatter(k + 1);
    lane.meetBeforePost();
    if (k + 1 < pieces) post(kData, k + 1, peer);
    if (k < pieces) {
      await();
      lane.meet();
      reduce(k);
      lane.meetBeforePost();
      post(kResult, k, rank);
    }
    if (k > 0) {
      await();
      lane.meet();
      gather(k - 1);
    }
  }
}

template <class T, class Op>
PROXYCCL_DEVICE void all_reduce_two_shot(ProxycclTeam* team, const T* in, T* out, uint64_t count) {
  constexpr uint64_t kOneRoundBytes = 32 * 1024;
  const bool proxied = team->lanes == 1;
  if (proxied && count * sizeof(T) <= minimum(kOneRoundBytes, team->exchange_bytes / team->world_size & ~127ull)) {
    allReduceInOneRound<T, Op>(team, in, out, count);
  } else {
    allReduceInPieces<T, Op>(team, in, out, count);
  }
}

}  // namespace proxyccl

#endif
