// Two-shot all-reduce with packets or lines, for medium messages: each rank reduces one share of the data for all ranks
// and sends the result to all ranks.
//
// Each element crosses links twice, and each of the n ranks sends 2 (n-1)/n times the array's bytes. One rank reduces a
// share in rank order, in the accumulator's type, and rounds once. Slot r holds the data of rank r, and slot n + r the
// result of rank r.
#pragma once

#include "instance.h"
#include "lines.h"

namespace proxyccl {

template <class Form, class T, class Op>
PROXYCCL_DEVICE void twoShotPackets(const ProxycclPacketTeam& team, const T* in, T* out, uint64_t count) {
  using Payload = typename Form::Payload;
  Lanes<Form> lanes(team);
  const uint32_t rank = team.rank, ranks = team.world_size;
  lanes.forEachEpoch([&](uint64_t first) {
    auto load = [&](uint32_t owner, uint64_t p) { return lanes.load(in, count, owner, first + p); };
    lanes.forEachPacket([&](uint64_t p) { lanes.sendToEach(rank, p, [&](uint32_t peer) { return load(peer, p); }); });
    lanes.forEachPacket([&](uint64_t p) {
      PacketReduction<T, Op, Payload> reduction(ranks);
      lanes.receiveFromAll(0, p, load(rank, p), reduction);
      const Payload sum = reduction.finish();
      lanes.sendToAll(ranks + rank, p, sum);
      lanes.store(out, count, rank, first + p, sum);
    });
    lanes.forEachPacket([&](uint64_t p) {
      lanes.receiveFromAll(ranks, p, {}, [&](uint32_t owner, const Payload& sum) {
        if (owner != rank) lanes.store(out, count, owner, first + p, sum);
      });
    });
  });
}

template <class T, class Op>
PROXYCCL_DEVICE void all_reduce_two_shot_packets(const ProxycclPacketTeam& team, const T* in, T* out, uint64_t count) {
  twoShotPackets<PacketForm, T, Op>(team, in, out, count);
}

template <class T, class Op>
PROXYCCL_DEVICE void all_reduce_two_shot_lines(const ProxycclPacketTeam& team, const T* in, T* out, uint64_t count) {
  twoShotPackets<LineForm, T, Op>(team, in, out, count);
}

}  // namespace proxyccl
