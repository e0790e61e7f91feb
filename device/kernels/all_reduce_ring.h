// Ring all-reduce: a reduce-scatter and an all-gather, each of n-1 steps, in which a rank only sends to the next one.
//
// 2 (n-1)/n times the bytes, spread over 2 (n-1) steps: for large messages, and for links that do not bear all pairs
// at once. Partial results travel in the accumulator's type and are rounded once, by the rank that completes the
// share; all ranks get its bits.
//
// Each step has a slot of its own, double-buffered by the round. A slot is reused two rounds later: a rank that has
// finished round r + 1 holds a share that passed through every rank in that round, and each of them started it after
// it had finished round r.
#ifndef PROXYCCL_ALL_REDUCE_RING_H
#define PROXYCCL_ALL_REDUCE_RING_H

#include "exchange.h"
#include "instance.h"

namespace proxyccl {

template <class T, class Op>
PROXYCCL_DEVICE void all_reduce_ring(ProxycclTeam* team, const T* in, T* out, uint64_t count) {
  using A = typename Element<T>::Accumulator;
  const uint32_t rank = team->rank, ranks = team->world_size, steps = ranks - 1;
  const uint32_t next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
  const Lane lane(team, 2 * steps);
  const uint64_t first_round = team->round;
  const uint64_t piece = lane.slotBytes() / sizeof(A);  // elements of one share that one lane takes in one round
  const uint64_t per_round = piece * ranks * lane.count();
  uint64_t round = first_round;

  for (uint64_t start = 0; start < count; start += per_round, ++round) {
    // This lane's elements of this round, cut into one share a rank; `left` evens out a short last round.
    const uint64_t left = minimum(per_round, count - start);
    const uint64_t per_lane = divideUp(left, lane.count());
    const uint64_t lane_begin = minimum(start + lane.number() * per_lane, start + left);
    const uint64_t lane_size = minimum(per_lane, start + left - lane_begin);
    const uint64_t share = divideUp(lane_size, ranks);
    auto begin = [&](uint32_t s) { return lane_begin + minimum(s * share, lane_size); };
    auto size = [&](uint32_t s) { return minimum(share, lane_begin + lane_size - begin(s)); };

    const uint32_t buffer = round % PROXYCCL_ROUND_BUFFERS;
    // What step `slot` sends: `value(i)` for the share's elements. Then waits for the same step's data from the
    // previous rank.
    auto pass = [&](uint32_t slot, auto* to, uint64_t n, auto&& value) {
      forEach(n, lane.thread(), lane.threads(), [&](uint64_t i) { to[i] = value(i); });
      lane.meetBeforePost();
      if (lane.talksTo(next)) lane.post(buffer, next, slot, slot, n * sizeof(*to));
      if (lane.talksTo(previous)) lane.await(previous);
      lane.meet();
    };

    for (uint32_t step = 0; step < steps; ++step) {
      const uint32_t s = (rank + ranks - step) % ranks;
      A* to = reinterpret_cast<A*>(lane.outbox(buffer, next, step, step));
      const T* mine = in + begin(s);
      if (step == 0) {
        pass(step, to, size(s), [&](uint64_t i) { return Element<T>::widen(mine[i]); });
      } else {
        const A* partial = reinterpret_cast<const A*>(lane.inbox(buffer, step - 1));
        pass(step, to, size(s), [&](uint64_t i) { return Op::combine(partial[i], Element<T>::widen(mine[i])); });
      }
    }
    for (uint32_t step = 0; step < steps; ++step) {
      const uint32_t slot = steps + step, s = (rank + 1 + ranks - step) % ranks;
      T* to = reinterpret_cast<T*>(lane.outbox(buffer, next, slot, slot));
      T* result = out + begin(s);
      const T* mine = in + begin(s);
      const char* received = lane.inbox(buffer, slot - 1);
      if (step == 0) {
        const A* partial = reinterpret_cast<const A*>(received);
        pass(slot, to, size(s), [&](uint64_t i) {
          return result[i] = Element<T>::narrow(Op::finish(Op::combine(partial[i], Element<T>::widen(mine[i])), ranks));
        });
      } else {
        const T* complete = reinterpret_cast<const T*>(received);
        pass(slot, to, size(s), [&](uint64_t i) { return result[i] = complete[i]; });
      }
    }
    const uint32_t last = (rank + 2) % ranks;
    copyBytes(out + begin(last), lane.inbox(buffer, 2 * steps - 1), size(last) * sizeof(T), lane.thread(),
              lane.threads());
  }
  finishKernel(team, round - first_round);
}

}  // namespace proxyccl

#endif
