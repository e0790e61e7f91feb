// MoE dispatch: each token's row goes once to every rank of its node that has one of its experts, and once to every
// other node that has such an expert. The receiver copies the row to the rows of its experts; with output buffers the
// sender stores it there itself.
//
// A rank counts its own slots by expert, segment by segment, and sends the counts to all ranks. From the counts of all
// ranks each rank computes the row of every slot that comes to it, while rows are already on their way. If tokens are
// few, ranks send their choices instead of counts (experts/announcement.h), and every rank counts the choices.
#ifndef PROXYCCL_EXPERT_DISPATCH_H
#define PROXYCCL_EXPERT_DISPATCH_H

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
  if (has_failed) return;  // no dispatch has written the layout: its numbers are arbitrary
  if constexpr (dispatch.kMasks)
    if (dispatch.storesMasked()) return dispatch.storeMaskedRows(group, &next_row);
  if constexpr (!dispatch.kOnlyStores) {
    // The group of the last thread is the last group with something to send.
    if (receives && threadIdx.x == blockDim.x - 1) dispatch.countCall();
    // In a kernel that receives, blocks without a segment, if there are any, send while the others receive. Otherwise
    // all blocks send.
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
    // One thread makes the store, which waits for the bus, so that only this thread's group starts to receive late.
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

// There are kernels that announce nothing, ids, the masks of few tokens, and, a share in each block, the masks of many
// tokens. With uint8_t rows are moved as bytes; with a type of tokens they become float8 where they are stored in
// output buffers. A layer needs few of these kernels, and each takes long to compile.
template <class T>
PROXYCCL_DEVICE void dispatch(const ProxycclExperts& experts, const ProxycclDispatch& call) {
  dispatchExperts<DispatchMode<void, T>>(experts, call);
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
// These kernels serve only dispatches that one launch completes and whose rows go to output buffers.
template <class T>
PROXYCCL_DEVICE void dispatch_masks_store(const ProxycclExperts& experts, const ProxycclDispatch& call) {
  dispatchExperts<DispatchMode<MaskAnnouncement<false>, T, true>>(experts, call);
}

}  // namespace proxyccl

#endif
