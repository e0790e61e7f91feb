// One-shot all-reduce with packets, for small messages: every rank sends all its data to every other rank, and each
// rank reduces all of it.
//
// One crossing of the link, (n-1) times the bytes. Each rank reduces in rank order, so all ranks get the same bits.
// Slot r holds the data of rank r.
#ifndef PROXYCCL_ALL_REDUCE_ONE_SHOT_H
#define PROXYCCL_ALL_REDUCE_ONE_SHOT_H

#include "instance.h"
#include "packets.h"

namespace proxyccl {

template <class T, class Op>
PROXYCCL_DEVICE void all_reduce_one_shot(const ProxycclPacketTeam& team, const T* in, T* out, uint64_t count) {
  PacketLanes lanes(team);
  auto load = [&](uint64_t i) { return loadPayload(in, count, i).pack(); };
  lanes.forEachEpoch([&](uint64_t first) {
    lanes.forEachPacket([&](uint64_t p) { lanes.sendToAll(team.rank, p, load(first + p)); });
    lanes.forEachPacket([&](uint64_t p) {
      PacketReduction<T, Op> reduction;
      lanes.receiveFromAll(0, p, load(first + p), reduction);
      storePayload(out, count, first + p, reduction.finish(team.world_size));
    });
  });
}

}  // namespace proxyccl

#endif
