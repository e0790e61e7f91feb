// MoE dispatch: each token's row goes once to every rank of its node that has one of its experts, and once to every
// other node that has one. The receiver copies it to the rows of its experts; with output buffers the sender stores it
// there.
//
// A rank counts its own slots by expert, segment by segment, and sends the counts to all ranks. From the counts of all
// ranks each rank computes the row of every slot that comes to it, while rows are already on their way. If tokens are
// few, ranks send the expert ids instead of counts (expert_announcement.h), and every rank counts them.
#ifndef PROXYCCL_EXPERT_DISPATCH_H
#define PROXYCCL_EXPERT_DISPATCH_H

#include "expert_dispatch_announced.h"
#include "expert_dispatch_counts.h"
#include "expert_dispatch_receive.h"
#include "expert_dispatch_send.h"
#include "expert_dispatch_store.h"

namespace proxyccl {

template <class Mode>
PROXYCCL_DEVICE void dispatchExperts(const ProxycclExperts& experts, const ProxycclDispatch& call) {
  constexpr bool kAnnounced = Mode::kAnnounced;
  __shared__ uint32_t finished, next_item, next_row;
  const Dispatch<Mode> dispatch(experts, call);
  const Group group;
  const bool sends = call.phases & PROXYCCL_EXPERT_SEND, gathers = call.phases & PROXYCCL_EXPERT_GATHER;
  const bool receives = call.phases & (PROXYCCL_EXPERT_RECEIVE | PROXYCCL_EXPERT_LAYOUT);
  if (threadIdx.x == 0) finished = next_item = next_row = 0;
  dispatch.begin();
  const bool last_thread = threadIdx.x == blockDim.x - 1;  // its group is the last that has something to send
  if (last_thread && receives && advance(experts, &experts.counters->dispatches) && !call.redispatch)
    storeRelaxedDevice<uint64_t>(&experts.counters->routings, experts.counters->routings + 1);
  // In a kernel that receives, blocks without a segment, if there are any, send while the others receive. Otherwise all
  // blocks send.
  const bool apart = receives && experts.segments < experts.blocks;
  const uint32_t first = apart ? experts.segments : 0;
  const bool stores = sends && receives && dispatch.storesRows();
  if (sends && !stores && blockIdx.x >= first)
    dispatch.send(group, blockIdx.x - first, experts.blocks - first, &finished);
  if (stores && !kAnnounced) return dispatch.storeCountedRows(group);
  if (dispatch.onlySends()) return;
  bool complete = true;
  typename Dispatch<Mode>::Gathered gathered = {0, ~0u, ~0u, 0};
  if (gathers && !kAnnounced) dispatch.forwardRouting();
  if (!call.redispatch && (receives || (gathers && blockIdx.x == 0)))
    complete = kAnnounced ? dispatch.awaitAnnouncements(&gathered) : dispatch.gatherCounts(group, &gathered);
  if (receives && complete) dispatch.prepareReceive(gathered.rows);
  if (stores && complete) dispatch.storeAnnouncedRows(group, &next_row);
  if (kAnnounced && sends) {
    if (!receives || stores) syncThreadsSystem();
    if (group.number == Group::count() - 1) dispatch.publishSent(group);
  }
  // One thread does it, as the store waits for the bus: only that thread's group receives later.
  if (gathers && complete && blockIdx.x == 0 && threadIdx.x == 0) dispatch.publishReceivedRows(gathered);
  if (!receives || !complete) return;
  dispatch.receive(group, &next_item, gathered);
  if (dispatch.describesSlots()) dispatch.describeSlots();
  if (!call.redispatch) dispatch.clearPastEnd(gathered.rows, blockIdx.x, experts.segments);
  if (blockIdx.x == 0 && !call.redispatch && !kAnnounced) dispatch.writeCounts(gathered.rows);
  if (stores && group.number == Group::count() - 1) dispatch.awaitStored(group);
  if (!kAnnounced) dispatch.acknowledge();
}

// Kernels that make float8 rows of T where they store rows in output buffers.
template <class T>
PROXYCCL_DEVICE void expert_dispatch_scaled(const ProxycclExperts& experts, const ProxycclDispatch& call) {
  dispatchExperts<DispatchMode<false, T>>(experts, call);
}
template <class T>
PROXYCCL_DEVICE void expert_dispatch_announced_scaled(const ProxycclExperts& experts, const ProxycclDispatch& call) {
  dispatchExperts<DispatchMode<true, T>>(experts, call);
}

}  // namespace proxyccl

#endif
