// Ring all-reduce: a reduce-scatter and an all-gather, each of n-1 steps, in which a rank sends only to the next rank.
//
// A rank sends 2 (n-1)/n times the array's bytes in 2 (n-1) steps. The ring is for large messages, and for links that
// cannot carry the data of all pairs of ranks at the same time. Partial results are sent in the accumulator's type. The
// rank that completes a share rounds it once, so all ranks get the same bits.
//
// Each step has its own slot, double-buffered by the parity of the round. A slot is reused two rounds later, without a
// flag: a rank that has finished round r + 1 holds a share that passed through every rank in round r + 1, and each rank
// started round r + 1 after it had finished round r.
#pragma once

#include "exchange.h"
#include "instance.h"

namespace proxyccl {

template <class T, class Op>
PROXYCCL_DEVICE void all_reduce_ring(const ProxycclTeam& team, const T* in, T* out, uint64_t count) {
  using A = typename Element<T>::Accumulator;
  const uint32_t rank = team.rank, ranks = team.world_size, steps = ranks - 1;
  const uint32_t next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
  const Lane lane(team, roundSlotBytes(team, 2 * steps), 2 * steps);
  const uint64_t first_round = team.counters->round;
  const uint64_t piece = lane.slotBytes() / sizeof(A);  // elements per share, lane and round
  const uint64_t per_round = piece * ranks * lane.count();
  uint64_t round = first_round;

  for (uint64_t start = 0; start < count; start += per_round, ++round) {
    // A short last round is spread evenly over the lanes.
    const uint64_t left = minimum(per_round, count - start);
    const uint64_t per_lane = divideUp(left, lane.count());
    const uint64_t lane_begin = minimum(start + lane.number() * per_lane, start + left);
    const uint64_t lane_size = minimum(per_lane, start + left - lane_begin);
    const uint64_t share = divideUp(lane_size, ranks);
    auto begin = [&](uint32_t s) { return lane_begin + minimum(s * share, lane_size); };
    auto size = [&](uint32_t s) { return minimum(share, lane_begin + lane_size - begin(s)); };

    const uint32_t buffer = round % PROXYCCL_ROUND_BUFFERS;
    // Sends value(i) for i < n to slot `slot` of the next rank, then waits for the previous rank's data of this step.
    auto pass = [&](uint32_t slot, auto* to, uint64_t n, auto&& value) {
      forEach(n, lane.thread(), lane.threads(), [&](uint64_t i) { to[i] = value(i); });
      lane.syncBeforePost();
      if (lane.handles(next)) lane.post(buffer, next, slot, slot, n * sizeof(*to));
      if (lane.handles(previous)) lane.await(previous);
      lane.sync();
    };

    for (uint32_t step = 0; step < steps; ++step) {
      const uint32_t s = (rank + ranks - step) % ranks;
      A* to = reinterpret_cast<A*>(lane.outbox(buffer, next, step, step));
      const T* mine = in + begin(s);
      if (step == 0) {
        pass(step, to, size(s), [&](uint64_t i) { return contribution<T, Op>(mine[i], ranks); });
      } else {
        const A* partial = reinterpret_cast<const A*>(lane.inbox(buffer, previous, step - 1));
        pass(step, to, size(s),
             [&](uint64_t i) { return Op::combine(partial[i], contribution<T, Op>(mine[i], ranks)); });
      }
    }
    for (uint32_t step = 0; step < steps; ++step) {
      const uint32_t slot = steps + step, s = (rank + 1 + ranks - step) % ranks;
      T* to = reinterpret_cast<T*>(lane.outbox(buffer, next, slot, slot));
      T* result = out + begin(s);
      const T* mine = in + begin(s);
      const char* received = lane.inbox(buffer, previous, slot - 1);
      if (step == 0) {
        const A* partial = reinterpret_cast<const A*>(received);
        pass(slot, to, size(s), [&](uint64_t i) {
          return result[i] =
                     finishReduction<T, Op>(Op::combine(partial[i], contribution<T, Op>(mine[i], ranks)), ranks);
        });
      } else {
        const T* complete = reinterpret_cast<const T*>(received);
        pass(slot, to, size(s), [&](uint64_t i) { return result[i] = complete[i]; });
      }
    }
    const uint32_t last = (rank + 2) % ranks;
    copyBytes(out + begin(last), lane.inbox(buffer, previous, 2 * steps - 1), size(last) * sizeof(T), lane.thread(),
              lane.threads());
  }
  finishKernel(team, round - first_round);
}

}  // namespace proxyccl
