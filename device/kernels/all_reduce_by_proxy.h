// All-reduce in which all blocks work as one lane (exchange.h), for ranks that reach some or all peers through the
// proxy.
//
// Each of the n ranks reduces one share of the data, in rank order, and sends the result to all ranks. A rank sends 2
// (n-1)/n times the array's bytes, and each element crosses links twice. The transfers of the shares' pieces overlap in
// a pipeline. In step k the grid
//   1. scatters piece k + 1: sends each peer the part that this peer reduces;
//   2. waits for the peers' scattered parts of piece k, reduces them, and distributes the result;
//   3. waits for the peers' results of piece k - 1, and stores these results.
//
// Scattered parts and results each have PROXYCCL_PIPELINE_DEPTH buffers, used in turn. The order of the steps
// guarantees, without flags, that a buffer is free when a rank writes to it:
//   - A rank that is about to scatter piece k + 1 has finished step k - 1, so it has every peer's results of the piece
//     k - 2. So the peers have reduced piece k - 2, and its buffer is free.
//   - A rank that is about to distribute the results of piece k has every peer's data of piece k, which the peers
//     scattered after step k - 2. So the peers have stored the results of piece k - 3, and their buffer is free.
//
// The buffers that stage data for the proxy are reused in the same way, because the proxy has read a buffer when the
// data has arrived at the peer. A buffer is also free when the next kernel uses it: a rank that starts a kernel has all
// results of the previous kernel, so all peers have reduced their data (dataBuffer() covers a previous kernel in
// rounds). The rank distributes results only when it has every peer's first data of this kernel, which a peer sends
// after it has ended the previous kernel.
#pragma once

#include "exchange.h"
#include "instance.h"
#include "reduce_ranks.h"
#include "reduce_scatter.h"

namespace proxyccl {

template <class T, class Op>
PROXYCCL_DEVICE void allReduceInPieces(const ProxycclTeam& team, const T* in, T* out, uint64_t count) {
  const uint32_t rank = team.rank, ranks = team.world_size;
  const Lane lane(team, team.slot_bytes, ranks - 1);
  const uint64_t next_round = team.counters->round;
  const uint64_t share = team.share, piece = team.piece, pieces = team.pieces;

  // The last pieces of a share may be short or empty.
  auto begin = [&](uint64_t k, uint32_t owner) { return minimum(owner * share + minimum(k * piece, share), count); };
  auto size = [&](uint64_t k, uint32_t owner) { return begin(k + 1, owner) - begin(k, owner); };
  auto data = [&](uint64_t k) { return dataBuffer(k, next_round); };
  auto outbox = [&](uint32_t buffer, uint32_t peer) {
    return lane.outbox(buffer, peer, slotOf(peer, rank), slotOf(rank, peer));
  };
  auto inbox = [&](uint32_t buffer, uint32_t peer) { return lane.inbox(buffer, peer, slotOf(rank, peer)); };

  auto scatter = [&](uint64_t k) {
    for (uint32_t i = 1; i < ranks; ++i) {
      const uint32_t peer = (rank + i) % ranks;
      copyBytes(outbox(data(k), peer), in + begin(k, peer), size(k, peer) * sizeof(T), lane.thread(), lane.threads());
    }
  };
  auto reduce = [&](uint64_t k) {
    const T* mine = in + begin(k, rank);
    T* result = out + begin(k, rank);
    reduceRanks<T, Op>(
        ranks, team.divisor, size(k, rank), isAligned16(mine) && isAligned16(result), lane.thread(), lane.threads(),
        [&](uint32_t source) { return source == rank ? mine : reinterpret_cast<const T*>(inbox(data(k), source)); },
        [&](uint64_t i, const auto& sum) {
          for (uint32_t peer = rank + 1; peer < ranks; ++peer)
            sum.store(reinterpret_cast<T*>(outbox(resultBuffer(k), peer)) + i);
          for (uint32_t peer = 0; peer < rank; ++peer)
            sum.store(reinterpret_cast<T*>(outbox(resultBuffer(k), peer)) + i);
          sum.store(result + i);
        });
  };
  auto gather = [&](uint64_t k) {
    for (uint32_t i = 1; i < ranks; ++i) {
      const uint32_t peer = (rank + i) % ranks;
      copyBytes(out + begin(k, peer), inbox(resultBuffer(k), peer), size(k, peer) * sizeof(T), lane.thread(),
                lane.threads());
    }
  };

  const uint32_t peer = threadIdx.x;
  const bool talks = lane.handles(peer);
  auto post = [&](uint32_t buffer, uint64_t k, uint32_t owner) {
    if (talks) lane.post(buffer, peer, slotOf(peer, rank), slotOf(rank, peer), size(k, owner) * sizeof(T));
  };
  auto await = [&] {
    if (talks) lane.await(peer);
    lane.sync();
  };

  scatter(0);
  lane.syncBeforePost();
  post(data(0), 0, peer);
  // Each rank posts first the data of piece 0, then in step k the data of piece k + 1 and the results of piece k. Every
  // peer waits for these posts in the same order.
  for (uint64_t k = 0; k <= pieces; ++k) {
    if (k + 1 < pieces) scatter(k + 1);
    lane.syncBeforePost();
    if (k + 1 < pieces) post(data(k + 1), k + 1, peer);
    if (k < pieces) {
      await();
      reduce(k);
      lane.syncBeforePost();
      post(resultBuffer(k), k, rank);
    }
    if (k > 0) {
      await();
      gather(k - 1);
    }
  }
}

template <class T, class Op>
PROXYCCL_DEVICE void all_reduce_by_proxy(const ProxycclTeam& team, const T* in, T* out, uint64_t count) {
  if (count * sizeof(T) <= team.one_crossing_bytes) {
    // Each rank sends its whole array to every peer: the data crosses links once, but a rank sends (n-1) times the
    // array's bytes. One crossing is faster if there are two ranks, or if data is so short that the links' latency
    // determines the time. If all peers are mapped, one block does all the work.
    reduceInRounds<T, Op>(team, in, 0, out, count);
  } else {
    allReduceInPieces<T, Op>(team, in, out, count);
  }
}

}  // namespace proxyccl
