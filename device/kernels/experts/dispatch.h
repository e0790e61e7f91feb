// MoE dispatch. A token's row is sent once to every rank of the sender's node that has one of the token's experts, and
// once to every other node that has one. The receiver copies the row to one output row for each of its experts that the
// token chose. With output buffers, the sender stores the row directly in those output rows.
//
// A rank counts its own slots by expert, segment by segment, and sends the counts to all ranks. From the counts of all
// ranks each rank computes the row of every slot whose expert it has, while rows are already in flight. If tokens are
// few, ranks send their choices instead of counts (experts/announcement.h), and every rank counts all choices.
#pragma once

#include "experts/dispatch_counts.h"
#include "experts/dispatch_ids.h"
#include "experts/dispatch_masks.h"
#include "experts/dispatch_receive.h"
#include "experts/dispatch_send.h"
#include "experts/dispatch_store.h"

namespace proxyccl {

template <class Mode>
PROXYCCL_DEVICE void dispatchExperts(const ProxycclExperts& experts, const ProxycclDispatch& call) {
  __shared__ uint32_t finished, next_item, next_row, has_failed;
  const Dispatch<Mode> dispatch(experts, call);
  constexpr bool kAnnounced = dispatch.kAnnounced;
  const Group group;
  const bool sends = call.phases & PROXYCCL_EXPERT_SEND, gathers = call.phases & PROXYCCL_EXPERT_GATHER;
  const bool receives = call.phases & (PROXYCCL_EXPERT_RECEIVE | PROXYCCL_EXPERT_LAYOUT);
  const bool stores = sends && receives && dispatch.storesRows();
  if (threadIdx.x == 0) {
    finished = next_item = next_row = 0;
    has_failed = call.redispatch ? loadRelaxedDevice<uint32_t>(&experts.counters->has_failed) : 0;
  }
  dispatch.begin();
  if (has_failed) return;  // the original dispatch failed before it wrote the layout, whose numbers are arbitrary
  if constexpr (dispatch.kMasks)
    if (dispatch.storesMasked()) return dispatch.storeMaskedRows(group, &next_row);
  if constexpr (!dispatch.kOnlyStores) {
    // The last thread calls countCall(), because rows to send go to its group last.
    if (receives && threadIdx.x == blockDim.x - 1) dispatch.countCall();
    // In a kernel that also receives, the blocks without a segment send while the other blocks receive. If every block
    // has a segment, or the kernel does not receive, all blocks send.
    const bool apart = receives && experts.segments < experts.blocks;
    const uint32_t first = apart ? experts.segments : 0;
    if (sends && !stores && blockIdx.x >= first)
      dispatch.send(group, blockIdx.x - first, experts.blocks - first, &finished);
    if constexpr (!kAnnounced)
      if (stores) return dispatch.storeCountedRows(group);
    if (dispatch.onlySends()) return;
    bool complete = true;
    typename Dispatch<Mode>::Gathered gathered = {0, ~0u, ~0u, 0};
    if (gathers && !kAnnounced) dispatch.forwardRouting();
    if (!call.redispatch && (receives || (gathers && blockIdx.x == 0))) complete = dispatch.gather(group, &gathered);
    if (receives && complete) dispatch.prepareReceive(gathered.rows);
    if (kAnnounced && sends) {
      if (!receives) syncThreadsSystem();
      if (group.number == Group::count() - 1) dispatch.publishSent(group);
    }
    // A single thread makes all stores to host memory, so that only this thread's group waits for these slow stores.
    if (gathers && complete && blockIdx.x == 0 && threadIdx.x == 0) dispatch.publishReceivedRows(gathered);
    if (!complete) dispatch.giveUp();
    if (!receives || !complete) return;
    dispatch.receive(group, &next_item, gathered);
    if (dispatch.describesSlots()) dispatch.describeSlots();
    if (!call.redispatch)
      dispatch.clearPastEnd(gathered.rows, blockIdx.x * blockDim.x + threadIdx.x, experts.segments * blockDim.x);
    if (blockIdx.x == 0 && !call.redispatch && !kAnnounced) dispatch.writeCounts(gathered.rows);
    if (dispatch.acknowledges()) dispatch.acknowledge();
  }
}

// There is one kernel per kind of announcement: none (counts are sent), ids, masks of few tokens, and masks of many
// tokens, of which each block announces a share. If T is uint8_t, rows are moved as bytes; if T is the tokens' type,
// rows in output buffers are converted to float8. The kernels are separate, because each takes long to compile and a
// layer needs few of them.
template <class T>
PROXYCCL_DEVICE void dispatch(const ProxycclExperts& experts, const ProxycclDispatch& call) {
  dispatchExperts<DispatchMode<Announcement, T>>(experts, call);
}
template <class T>
PROXYCCL_DEVICE void dispatch_ids(const ProxycclExperts& experts, const ProxycclDispatch& call) {
  dispatchExperts<DispatchMode<IdAnnouncement, T>>(experts, call);
}
template <class T>
PROXYCCL_DEVICE void dispatch_masks(const ProxycclExperts& experts, const ProxycclDispatch& call) {
  dispatchExperts<DispatchMode<MaskAnnouncement<false>, T>>(experts, call);
}
template <class T>
PROXYCCL_DEVICE void dispatch_shared_masks(const ProxycclExperts& experts, const ProxycclDispatch& call) {
  dispatchExperts<DispatchMode<MaskAnnouncement<true>, T>>(experts, call);
}
template <class T>
PROXYCCL_DEVICE void dispatch_masks_store(const ProxycclExperts& experts, const ProxycclDispatch& call) {
  dispatchExperts<DispatchMode<MaskAnnouncement<false>, T, true>>(experts, call);
}

}  // namespace proxyccl
