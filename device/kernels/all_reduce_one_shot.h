// One-shot all-reduce with packets or lines, for small messages: every rank sends all its data to every other rank, and
// each rank reduces all data.
//
// Each element crosses a link once, and each of the n ranks sends (n-1) times the array's bytes. Each rank reduces in
// rank order, so all ranks get the same bits. Slot r holds the data of rank r.
#pragma once

#include "instance.h"
#include "lines.h"

namespace proxyccl {

template <class Form, class T, class Op>
PROXYCCL_DEVICE void oneShot(const ProxycclPacketTeam& team, const T* in, T* out, uint64_t count) {
  Lanes<Form> lanes(team);
  lanes.forEachEpoch([&](uint64_t first) {
    auto load = [&](uint64_t p) { return lanes.load(in, count, 0, first + p); };
    lanes.forEachPacket([&](uint64_t p) { lanes.sendToAll(team.rank, p, load(p)); });
    lanes.forEachPacket([&](uint64_t p) {
      PacketReduction<T, Op, typename Form::Payload> reduction(team.world_size);
      lanes.receiveFromAll(0, p, load(p), reduction);
      lanes.store(out, count, 0, first + p, reduction.finish());
    });
  });
}

template <class T, class Op>
PROXYCCL_DEVICE void all_reduce_one_shot(const ProxycclPacketTeam& team, const T* in, T* out, uint64_t count) {
  oneShot<PacketForm, T, Op>(team, in, out, count);
}

template <class T, class Op>
PROXYCCL_DEVICE void all_reduce_one_shot_lines(const ProxycclPacketTeam& team, const T* in, T* out, uint64_t count) {
  oneShot<LineForm, T, Op>(team, in, out, count);
}

}  // namespace proxyccl
