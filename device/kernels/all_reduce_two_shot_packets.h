// Two-shot all-reduce with packets, for medium messages: each rank reduces one share of the data for all ranks and
// sends the result to all ranks, all in packets.
//
// Two crossings of the link, 2 (n-1)/n times the bytes and as much again for the flags. A share is reduced by one rank,
// in rank order, accumulated in the wide type and rounded once. Slot r holds the data of rank r, slot n + r its result.
#ifndef PROXYCCL_ALL_REDUCE_TWO_SHOT_PACKETS_H
#define PROXYCCL_ALL_REDUCE_TWO_SHOT_PACKETS_H

#include "instance.h"
#include "packets.h"

namespace proxyccl {

template <class T, class Op>
PROXYCCL_DEVICE void all_reduce_two_shot_packets(const ProxycclPacketTeam& team, const T* in, T* out, uint64_t count) {
  PacketLanes lanes(team);
  const uint32_t rank = team.rank, ranks = team.world_size;
  lanes.forEachEpoch([&](uint64_t first) {
    // Padding is not loaded or stored: past the share's end lies the next rank's share, which other threads load and
    // store.
    auto inShare = [&](uint64_t p) { return first + p < team.packets; };
    auto number = [&](uint32_t owner, uint64_t p) { return owner * team.packets + first + p; };
    auto load = [&](uint32_t owner, uint64_t p) {
      return inShare(p) ? loadPayload(in, count, number(owner, p)).pack() : LL16Packet::Payload{};
    };
    lanes.forEachPacket([&](uint64_t p) { lanes.sendToEach(rank, p, [&](uint32_t peer) { return load(peer, p); }); });
    lanes.forEachPacket([&](uint64_t p) {
      PacketReduction<T, Op> reduction;
      lanes.receiveFromAll(0, p, load(rank, p), reduction);
      const PayloadOf<T> sum = reduction.finish(ranks);
      lanes.sendToAll(ranks + rank, p, sum.pack());
      if (inShare(p)) storePayload(out, count, number(rank, p), sum);
    });
    lanes.forEachPacket([&](uint64_t p) {
      lanes.receiveFromAll(ranks, p, {}, [&](uint32_t owner, LL16Packet::Payload sum) {
        if (owner != rank && inShare(p)) storePayload(out, count, number(owner, p), PayloadOf<T>::unpack(sum));
      });
    });
  });
}

}  // namespace proxyccl

#endif
