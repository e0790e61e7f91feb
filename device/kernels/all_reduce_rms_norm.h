// all_reduce of rows, in packets or lines, then the residual's addition and RMSNorm of each row (rms_norm.h), in one
// launch.
//
// A block has whole rows: row r belongs to block r % gridDim.x on every rank. Rows past the last one are padding, whose
// packets are sent too. In one shot every rank sends a row's packets to every other rank, and each reduces all of them:
// slot r holds the data of rank r. In two shots a packet has an owner, to which the other ranks send theirs. The owner
// reduces them and sends the sum to all ranks: slot n + r holds sums of rank r. Owners are dealt out by warps, so all
// threads of a warp take the same steps.
//
// Why packets' places can be used again in two shots (packets.h): a thread has the same packets and so the same owners
// in every epoch of a kernel. A rank's thread that goes on to epoch e + 2 has the sum of e + 1, which its owner sent
// after the same threads of all ranks had sent it their packets of e + 1, so these threads had ended epoch e.
#ifndef PROXYCCL_ALL_REDUCE_RMS_NORM_H
#define PROXYCCL_ALL_REDUCE_RMS_NORM_H

#include "instance.h"
#include "rms_norm.h"

namespace proxyccl {

// Calls send(row, p, of_row) for this thread's packets p of each epoch, which are `of_row` in the row, and then
// receive(p, own), which returns the sum of packet p. Takes the sums, and norms each row.
template <class Form, class T, class Send, class Receive>
PROXYCCL_DEVICE void reduceRows(Lanes<Form>& lanes, const Rows<T>& rows, Send send, Receive receive) {
  NormedRow<Form, T> row(rows);
  uint64_t number = blockIdx.x, first = 0;  // the row, and the epoch's first packet in the row
  row.begin(number);
  lanes.forEachEpoch([&](uint64_t) {
    lanes.forEachPacket([&](uint64_t p) { send(p, row.load(rows.x, first + p)); });
    lanes.forEachPacket([&](uint64_t p) {
      const auto residual = row.load(rows.residual, first + p);
      row.take(first + p, receive(p, row.load(rows.x, first + p)), residual);
    });
    first += rows.packets;
    if (first < static_cast<uint64_t>(rows.row_epochs) * rows.packets) return;
    row.norm();
    number += gridDim.x, first = 0;
    row.begin(number);
  });
}

template <class Form, class T>
PROXYCCL_DEVICE auto reduced(const ProxycclPacketTeam& team, Lanes<Form>& lanes, uint64_t p,
                             const typename Form::Payload& own) {
  PacketReduction<T, Sum, typename Form::Payload> reduction(team.world_size);
  lanes.receiveFromAll(0, p, own, reduction);
  return reduction.finish();
}

template <class Form, class T>
PROXYCCL_DEVICE void oneShotRows(const ProxycclPacketTeam& team, const Rows<T>& rows) {
  using Payload = typename Form::Payload;
  Lanes<Form> lanes(team);
  reduceRows(
      lanes, rows, [&](uint64_t p, const Payload& own) { lanes.sendToAll(team.rank, p, own); },
      [&](uint64_t p, const Payload& own) { return reduced<Form, T>(team, lanes, p, own); });
}

template <class Form, class T>
PROXYCCL_DEVICE void twoShotRows(const ProxycclPacketTeam& team, const Rows<T>& rows) {
  using Payload = typename Form::Payload;
  Lanes<Form> lanes(team);
  const uint32_t ranks = team.world_size;
  auto ownerOf = [&](uint64_t p) { return static_cast<uint32_t>(p / PROXYCCL_WARP_SIZE % ranks); };
  reduceRows(
      lanes, rows,
      [&](uint64_t p, const Payload& own) {
        if (ownerOf(p) != team.rank) lanes.send(ownerOf(p), team.rank, p, own);
      },
      [&](uint64_t p, const Payload& own) {
        const uint32_t owner = ownerOf(p);
        if (owner != team.rank) return lanes.receive(owner, ranks + owner, p);
        const Payload sum = reduced<Form, T>(team, lanes, p, own);
        lanes.sendToAll(ranks + owner, p, sum);
        return sum;
      });
}

template <class T>
PROXYCCL_DEVICE void one_shot_rms_norm_packets(const ProxycclPacketTeam& team, const Rows<T>& rows) {
  oneShotRows<PacketForm>(team, rows);
}
template <class T>
PROXYCCL_DEVICE void one_shot_rms_norm_lines(const ProxycclPacketTeam& team, const Rows<T>& rows) {
  oneShotRows<LineForm>(team, rows);
}
template <class T>
PROXYCCL_DEVICE void two_shot_rms_norm_packets(const ProxycclPacketTeam& team, const Rows<T>& rows) {
  twoShotRows<PacketForm>(team, rows);
}
template <class T>
PROXYCCL_DEVICE void two_shot_rms_norm_lines(const ProxycclPacketTeam& team, const Rows<T>& rows) {
  twoShotRows<LineForm>(team, rows);
}

}  // namespace proxyccl

#define PROXYCCL_TYPED_KERNEL(kernel, name, T)                                            \
  PROXYCCL_TEAM_KERNEL name(const ProxycclPacketTeam team, PROXYCCL_ROWS_PARAMETERS(T)) { \
    ::proxyccl::kernel<T>(team, {PROXYCCL_ROWS_ARGUMENTS});                               \
  }                                                                                       \
  PROXYCCL_EXPORT_KERNEL(name)

#endif
