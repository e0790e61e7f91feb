/* The order on streams of transfers between pairs of ranks (channels/collectives/flows.py), and the issue of their
 * launches: one call, for calls that are made for the first time and for repeated ones.
 *
 * A flow is a direction of a pair of ranks. A launch follows the last launch of each of its flows, by an event after
 * that one. Waiting for the whole stream would not do: work that was queued later may wait for the peer.
 */
#ifndef PROXYCCL_FLOW_ORDER_H
#define PROXYCCL_FLOW_ORDER_H

#include <stdint.h>

#include "launch.h"
#include "proxyccl/control.h"
#include "stream_order.h"

/* The latest launch of a flow. */
typedef struct ProxycclLastOfFlow {
  uintptr_t event;  /* after it; 0 if there was none */
  uintptr_t stream; /* its stream, or PROXYCCL_NO_STREAM if the handle may mean another one later */
  int captured;     /* into a graph, so that nothing outside the graph can wait for the event */
} ProxycclLastOfFlow;

#define PROXYCCL_NO_STREAM UINTPTR_MAX

/* One group's flows. The caller holds a lock around each call. */
typedef struct ProxycclFlowOrder {
  const ProxycclStreamOrder *streams;
  const ProxycclControl *control;
  uintptr_t thread_stream; /* the handle that means another stream in each thread; PROXYCCL_NO_STREAM if none does */
  ProxycclLastOfFlow *last;
  uint32_t flow_count;
} ProxycclFlowOrder;

/* Transfers that are issued together. */
typedef struct ProxycclFlowCall {
  const uint32_t *flows; /* their indexes, and the number of these */
  uint32_t flow_count;
  const ProxycclLaunch *const *launches;
  uint32_t launch_count;
  uintptr_t event; /* recorded after the launches; no other call's */
} ProxycclFlowCall;

/* Issues a call on a stream. Returns the driver's status, PROXYCCL_OTHER_CONTEXT with nothing done, or
 * PROXYCCL_CALL_ABORTED (calls.h) if a rank has failed. `unused` has it fit where proxyccl_calls_issue does. */
int proxyccl_flow_order_issue(ProxycclFlowOrder *order, const ProxycclFlowCall *call, const void *unused,
                              uintptr_t stream);
/* From now on the latest launches of a call's flows are on a stream whose handle may mean another one. */
void proxyccl_flow_order_unname(ProxycclFlowOrder *order, const ProxycclFlowCall *call);
/* Whether a later launch may wait for an event. */
int proxyccl_flow_order_needs(const ProxycclFlowOrder *order, uintptr_t event);

#endif
