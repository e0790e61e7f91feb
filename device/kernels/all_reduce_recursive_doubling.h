// Recursive-doubling all-reduce with packets: in step s a rank swaps partial results with the rank whose number
// differs in bit s.
//
// If there are n = 2^s ranks, each rank sends the array s times. If n is not a power of two, let p be the largest power
// of two below n: each rank r >= p first sends its data to rank r - p, which sends back the result at the end.
// Partial results are sent in the accumulator's type. The two ranks of a step combine their partial results in rank
// order, so all ranks get the same bits. A rank receives at most one packet from each other rank in an epoch, in the
// slot of that rank.
#pragma once

#include "instance.h"
#include "packets.h"

namespace proxyccl {

template <class T, class Op>
PROXYCCL_DEVICE void all_reduce_recursive_doubling(const ProxycclPacketTeam& team, const T* in, T* out,
                                                   uint64_t count) {
  using A = typename Element<T>::Accumulator;
  using Payload = PayloadOf<A>;
  constexpr uint32_t kPerPacket = Payload::kCount;
  const uint32_t rank = team.rank, ranks = team.world_size;
  uint32_t power = 1;
  while (power * 2 <= ranks) power *= 2;
  const bool beyond = rank >= power, has_partner_beyond = rank + power < ranks;

  Lanes<PacketForm> lanes(team);
  lanes.forEachEpoch([&](uint64_t first) {
    // A thread does all steps of one packet before it begins its next packet, so partial results stay in registers.
    lanes.forEachPacket([&](uint64_t p) {
      Payload partial{};
      for (uint32_t k = 0; k < kPerPacket; ++k) {
        const uint64_t i = (first + p) * kPerPacket + k;
        if (i < count) partial.values[k] = contribution<T, Op>(in[i], ranks);
      }
      auto combine = [&](uint32_t peer) {
        const Payload other = Payload::unpack(lanes.receive(peer, peer, p));
        for (uint32_t k = 0; k < kPerPacket; ++k) {
          const A mine = partial.values[k];
          partial.values[k] = rank < peer ? Op::combine(mine, other.values[k]) : Op::combine(other.values[k], mine);
        }
      };
      if (beyond) {
        lanes.send(rank - power, rank, p, partial.pack());
        partial = Payload::unpack(lanes.receive(rank - power, rank - power, p));
      } else {
        if (has_partner_beyond) combine(rank + power);
        for (uint32_t bit = 1; bit < power; bit *= 2) {
          lanes.send(rank ^ bit, rank, p, partial.pack());
          combine(rank ^ bit);
        }
        if (has_partner_beyond) lanes.send(rank + power, rank, p, partial.pack());
      }
      for (uint32_t k = 0; k < kPerPacket; ++k) {
        const uint64_t i = (first + p) * kPerPacket + k;
        if (i < count) out[i] = finishReduction<T, Op>(partial.values[k], ranks);
      }
    });
  });
}

}  // namespace proxyccl
