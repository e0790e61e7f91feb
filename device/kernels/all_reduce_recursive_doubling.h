// Recursive-doubling all-reduce with packets: in step s a rank swaps partial results with the rank whose number
// differs in bit s.
//
// ceil(log2 n) crossings of the link and as many times the bytes. Where n is no power of two, each rank beyond the
// largest power of two below n first hands its data to the rank that many below it, and gets the result at the end.
// Partial results travel in the accumulator's type. Partners combine in the order of their ranks, so all ranks get
// the same bits.
//
// Slots: 0 and 1 are for the ranks beyond the power of two, 2 + s for step s. Reuse after two epochs is safe as in
// the one-shot algorithm: to finish an epoch needs data of every rank, and each sends it after its previous kernel.
#ifndef PROXYCCL_ALL_REDUCE_RECURSIVE_DOUBLING_H
#define PROXYCCL_ALL_REDUCE_RECURSIVE_DOUBLING_H

#include "packets.h"

namespace proxyccl {

template <class T, class Op>
PROXYCCL_DEVICE void all_reduce_recursive_doubling(ProxycclTeam* team, const T* in, T* out, uint64_t count) {
  using A = typename Element<T>::Accumulator;
  using Payload = PayloadOf<A>;
  constexpr uint32_t kPerPacket = Payload::kCount;
  constexpr uint32_t kFold = 0, kUnfold = 1, kFirstStep = 2;
  const uint32_t rank = team->rank, ranks = team->world_size;
  const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  uint32_t power = 1, steps = 0;
  for (; power * 2 <= ranks; power *= 2) ++steps;
  const bool beyond = rank >= power, has_partner_beyond = rank + power < ranks;

  PacketLanes lanes(team, kFirstStep + steps);
  const uint64_t packets = (count + kPerPacket - 1) / kPerPacket;
  const uint64_t span = lanes.packetsPerEpoch(packets);
  for (uint64_t first = 0; first < packets; first += span) {
    // A thread handles the same packets in every step and epoch, so it alone touches its accumulators.
    auto* accumulators = reinterpret_cast<Payload*>(lanes.accumulators());
    auto send = [&](uint32_t peer, uint32_t slot) {
      LL16Packet* remote = lanes.remote(peer, slot);
      forEach(span, thread, threads, [&](uint64_t p) { remote[p].write(accumulators[p].pack(), lanes.flag()); });
    };
    auto receive = [&](uint32_t peer, uint32_t slot, auto&& use) {
      const LL16Packet* local = lanes.local(slot);
      forEach(span, thread, threads,
              [&](uint64_t p) { use(p, Payload::unpack(readPacket(&local[p], lanes.flag(), team->control, peer))); });
    };
    auto combine = [&](uint32_t peer) {
      return [&, peer](uint64_t p, const Payload& other) {
        for (uint32_t k = 0; k < kPerPacket; ++k) {
          const A mine = accumulators[p].values[k];
          accumulators[p].values[k] =
              rank < peer ? Op::combine(mine, other.values[k]) : Op::combine(other.values[k], mine);
        }
      };
    };

    forEach(span, thread, threads, [&](uint64_t p) {
      for (uint32_t k = 0; k < kPerPacket; ++k) {
        const uint64_t i = (first + p) * kPerPacket + k;
        accumulators[p].values[k] = i < count ? Element<T>::widen(in[i]) : A{};
      }
    });
    if (beyond) {
      send(rank - power, kFold);
      receive(rank - power, kUnfold, [&](uint64_t p, const Payload& result) { accumulators[p] = result; });
    } else {
      if (has_partner_beyond) receive(rank + power, kFold, combine(rank + power));
      for (uint32_t step = 0; step < steps; ++step) {
        const uint32_t peer = rank ^ 1u << step;
        send(peer, kFirstStep + step);
        receive(peer, kFirstStep + step, combine(peer));
      }
      if (has_partner_beyond) send(rank + power, kUnfold);
    }
    forEach(span, thread, threads, [&](uint64_t p) {
      for (uint32_t k = 0; k < kPerPacket; ++k) {
        const uint64_t i = (first + p) * kPerPacket + k;
        if (i < count) out[i] = Element<T>::narrow(Op::finish(accumulators[p].values[k], ranks));
      }
    });
    lanes.nextEpoch();
  }
  lanes.finish();
}

}  // namespace proxyccl

#endif
