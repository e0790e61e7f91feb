#include "flow_order.h"

#include "calls.h"
#include "order.h"

/* Makes a stream wait for earlier launches of a call's flows on other streams. Returns the driver's status.
 *
 * A stream that is being captured into a graph can't wait for one that is not; the graph's own launches are the
 * program's to order. */
static int follow_earlier(const ProxycclFlowOrder *order, const ProxycclFlowCall *call, uintptr_t stream,
                          int captured) {
  uintptr_t waited = 0;
  for (uint32_t i = 0; i < call->flow_count; ++i) {
    const ProxycclLastOfFlow *last = &order->last[call->flows[i]];
    if (last->event == 0 || last->event == waited || last->captured != captured || last->stream == stream) continue;
    const int status = order->streams->wait((void *)stream, (void *)last->event, 0);
    if (status != 0) return status;
    waited = last->event;
  }
  return 0;
}

int proxyccl_flow_order_issue(ProxycclFlowOrder *order, const ProxycclFlowCall *call, const void *unused,
                              uintptr_t stream) {
  (void)unused;
  if (!proxyccl_order_is_current(order->streams)) return PROXYCCL_OTHER_CONTEXT;
  const int captured = proxyccl_stream_captures(order->streams, stream);
  int status = follow_earlier(order, call, stream, captured);
  if (status != 0) return status;
  /* The last look before the driver is called: a kernel that begins after a failure must not use memory that a peer may
   * have freed. */
  if (failure_is_told(order->control)) return PROXYCCL_CALL_ABORTED;
  for (uint32_t i = 0; i < call->launch_count && status == 0; ++i)
    status = proxyccl_launch_current(call->launches[i], stream);
  if (status == 0) status = order->streams->record((void *)call->event, (void *)stream);
  if (status != 0) return status;
  const ProxycclLastOfFlow last = {
      .event = call->event,
      .stream = stream == order->thread_stream ? PROXYCCL_NO_STREAM : stream,
      .captured = captured,
  };
  for (uint32_t i = 0; i < call->flow_count; ++i) order->last[call->flows[i]] = last;
  return 0;
}

void proxyccl_flow_order_unname(ProxycclFlowOrder *order, const ProxycclFlowCall *call) {
  for (uint32_t i = 0; i < call->flow_count; ++i) order->last[call->flows[i]].stream = PROXYCCL_NO_STREAM;
}

int proxyccl_flow_order_needs(const ProxycclFlowOrder *order, uintptr_t event) {
  for (uint32_t i = 0; i < order->flow_count; ++i)
    if (order->last[i].event == event) return 1;
  return 0;
}
