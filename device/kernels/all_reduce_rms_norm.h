// Reduces rows over all ranks by packets or lines, then adds a residual to each row and normalizes it (rms_norm.h), in
// one launch. The size of a row must be a multiple of 16 bytes.
//
// A block handles whole rows or a part of each row; blocks with the same number handle the same rows on every rank.
// Packets are also sent for padding rows beyond the last row. In the one-shot algorithm every rank sends its packets to
// every other rank, and each rank reduces all packets: slot r holds the data of rank r. In the two-shot algorithm each
// packet number has an owner, the rank to which the other ranks send their packets of this number. The owner reduces
// these packets and sends the sum to all ranks: with n ranks, slot n + r holds the sums that rank r has computed. All
// packets of a warp have the same owner, so the warp's threads do not diverge.
//
// In the two-shot algorithm, epoch e + 2 may overwrite the packets of epoch e (packets.h), because a thread has the
// same packets and so the same owners in every epoch of a kernel. A thread that begins epoch e + 2 has the sum of epoch
// e + 1. The owner sent this sum after the corresponding threads of all ranks had sent their packets of epoch e + 1,
// which these threads did after they had ended epoch e.
#pragma once

#include "instance.h"
#include "rms_norm.h"

namespace proxyccl {

// In each epoch calls send(p, own) for this thread's packets p, and then receive(p, own), which returns the sum of all
// ranks' packets p. Collects the sums, and normalizes each row. A block sends the packets of its next row before it
// normalizes a row, so that the packets travel during the normalization.
template <bool kWhole, uint32_t kBlocks, class Form, class T, class Send, class Receive>
PROXYCCL_DEVICE void reduceRows(Lanes<Form>& lanes, const Rows<T>& rows, Send send, Receive receive) {
  NormedRow<Form, T, kWhole, kBlocks> row(rows);
  uint32_t epoch = 0;
  bool is_first = true;
  lanes.forEachEpoch([&](uint64_t) {
    const bool begins_next = epoch == rows.row_epochs;
    if (begins_next) epoch = 0, is_first = false;
    row.forEachOfEpoch([&](uint32_t p) { send(p, row.load(epoch, p, begins_next ? row.next() : row.number())); });
    if (begins_next) {
      row.forEachOfEpoch([&](uint32_t p) { row.prefetchRows(epoch, p); });
      row.norm();
      row.goOn();
    }
    if (is_first && epoch == 0) RowBlocks<kBlocks>::awaitStart();
    row.forEachOfEpoch([&](uint32_t p) {
      if (is_first && rows.weight != nullptr) row.keepWeights(epoch, p);
      const auto residual = row.residual(epoch, p);
      row.take(epoch, p, receive(p, row.load(epoch, p, row.number())), residual);
    });
    ++epoch;
  });
  row.norm();
}

template <class Form, class T>
PROXYCCL_DEVICE auto reduced(const ProxycclPacketTeam& team, Lanes<Form>& lanes, uint32_t p,
                             const typename Form::Payload& own) {
  PacketReduction<T, Sum, typename Form::Payload> reduction(team.world_size);
  lanes.receiveFromAll(0, p, own, reduction);
  return reduction.finish();
}

template <class Form, class T, bool kWhole, uint32_t kBlocks>
PROXYCCL_DEVICE void oneShotRows(const ProxycclPacketTeam& team, const Rows<T>& rows) {
  using Payload = typename Form::Payload;
  Lanes<Form> lanes(team);
  reduceRows<kWhole, kBlocks>(
      lanes, rows, [&](uint32_t p, const Payload& own) { lanes.sendToAll(team.rank, p, own); },
      [&](uint32_t p, const Payload& own) { return reduced<Form, T>(team, lanes, p, own); });
}

template <class Form, class T, bool kWhole, uint32_t kBlocks>
PROXYCCL_DEVICE void twoShotRows(const ProxycclPacketTeam& team, const Rows<T>& rows) {
  using Payload = typename Form::Payload;
  Lanes<Form> lanes(team);
  const uint32_t ranks = team.world_size;
  auto ownerOf = [&](uint32_t p) { return p / PROXYCCL_WARP_SIZE % ranks; };
  reduceRows<kWhole, kBlocks>(
      lanes, rows,
      [&](uint32_t p, const Payload& own) {
        if (ownerOf(p) != team.rank) lanes.send(ownerOf(p), team.rank, p, own);
      },
      [&](uint32_t p, const Payload& own) {
        const uint32_t owner = ownerOf(p);
        if (owner != team.rank) return lanes.receive(owner, ranks + owner, p);
        const Payload sum = reduced<Form, T>(team, lanes, p, own);
        lanes.sendToAll(ranks + owner, p, sum);
        return sum;
      });
}

// A kernel's name has "packets" or "lines", the number of blocks per row if this is not one, and "_apart" if this
// rank's arrays need not be aligned to 16 bytes. Ranks may use kernels with and without "_apart" in the same call.
#define PROXYCCL_ROWS_KERNEL(suffix, Form, kWhole, kBlocks)                                              \
  template <class T>                                                                                     \
  PROXYCCL_DEVICE void one_shot_rms_norm_##suffix(const ProxycclPacketTeam& team, const Rows<T>& rows) { \
    oneShotRows<Form, T, kWhole, kBlocks>(team, rows);                                                   \
  }                                                                                                      \
  template <class T>                                                                                     \
  PROXYCCL_DEVICE void two_shot_rms_norm_##suffix(const ProxycclPacketTeam& team, const Rows<T>& rows) { \
    twoShotRows<Form, T, kWhole, kBlocks>(team, rows);                                                   \
  }
PROXYCCL_ROWS_KERNEL(packets, PacketForm, true, 1)
PROXYCCL_ROWS_KERNEL(packets_apart, PacketForm, false, 1)
PROXYCCL_ROWS_KERNEL(lines, LineForm, true, 1)
PROXYCCL_ROWS_KERNEL(lines_apart, LineForm, false, 1)
#if PROXYCCL_HAS_CLUSTERS
PROXYCCL_ROWS_KERNEL(lines_2, LineForm, true, 2)
PROXYCCL_ROWS_KERNEL(lines_2_apart, LineForm, false, 2)
PROXYCCL_ROWS_KERNEL(lines_4, LineForm, true, 4)
PROXYCCL_ROWS_KERNEL(lines_4_apart, LineForm, false, 4)
#endif

}  // namespace proxyccl

// For each kernel, the number of blocks that share a row.
#define PROXYCCL_CLUSTER_one_shot_rms_norm_packets
#define PROXYCCL_CLUSTER_two_shot_rms_norm_packets
#define PROXYCCL_CLUSTER_one_shot_rms_norm_packets_apart
#define PROXYCCL_CLUSTER_two_shot_rms_norm_packets_apart
#define PROXYCCL_CLUSTER_one_shot_rms_norm_lines
#define PROXYCCL_CLUSTER_two_shot_rms_norm_lines
#define PROXYCCL_CLUSTER_one_shot_rms_norm_lines_apart
#define PROXYCCL_CLUSTER_two_shot_rms_norm_lines_apart
#define PROXYCCL_CLUSTER_one_shot_rms_norm_lines_2 __cluster_dims__(2, 1, 1)
#define PROXYCCL_CLUSTER_two_shot_rms_norm_lines_2 __cluster_dims__(2, 1, 1)
#define PROXYCCL_CLUSTER_one_shot_rms_norm_lines_2_apart __cluster_dims__(2, 1, 1)
#define PROXYCCL_CLUSTER_two_shot_rms_norm_lines_2_apart __cluster_dims__(2, 1, 1)
#define PROXYCCL_CLUSTER_one_shot_rms_norm_lines_4 __cluster_dims__(4, 1, 1)
#define PROXYCCL_CLUSTER_two_shot_rms_norm_lines_4 __cluster_dims__(4, 1, 1)
#define PROXYCCL_CLUSTER_one_shot_rms_norm_lines_4_apart __cluster_dims__(4, 1, 1)
#define PROXYCCL_CLUSTER_two_shot_rms_norm_lines_4_apart __cluster_dims__(4, 1, 1)

#define PROXYCCL_TYPED_KERNEL(kernel, name, T)                                                     \
  extern "C" __global__ void __launch_bounds__(PROXYCCL_MAX_BLOCK_THREADS, 1)                      \
      PROXYCCL_CLUSTER_##kernel name(const ProxycclPacketTeam team, PROXYCCL_ROWS_PARAMETERS(T)) { \
    ::proxyccl::kernel<T>(team, {PROXYCCL_ROWS_ARGUMENTS});                                        \
  }                                                                                                \
  PROXYCCL_EXPORT_KERNEL(name)
