/* Parameters of send_receive.h: the ranks, and one call. Plain C.
 *
 * A *flow* leads from one rank to another. It has `lanes` lanes, each with a ring of slots in the receiver's scratch
 * memory and a link. The link's signals count pieces in the flow's direction, and in the opposite direction credits:
 * slots that the receiver has read. So a flow involves only its two ranks, and flows never wait for one another.
 */
#pragma once

#include "team.h"

enum {
  PROXYCCL_FLOW_SLOTS = 4, /* slots of a lane: how many pieces can be sent before the receiver has read the first one */
  PROXYCCL_FLOW_HEADER_BYTES = 128, /* before a slot's data: the transfer's size, which the receiver checks */
  PROXYCCL_MAX_TRANSFERS = 64       /* most transfers of one launch, whose blocks must all be resident */
};

/* One transfer of a launch: to a peer, from a peer, or from `src` to `dst` where the peer is the rank itself. */
typedef struct ProxycclTransfer {
  const char* src; /* null if the transfer receives */
  char* dst;       /* null if the transfer sends */
  uint64_t bytes;
  uint64_t lane_bytes; /* bytes of each lane; the last may have fewer */
  uint32_t peer;
  uint32_t lanes; /* blocks that work on the transfer; the sender and the receiver have the same number */
} ProxycclTransfer;

/* A kernel parameter, passed by value. */
typedef struct ProxycclFlows {
  uint32_t rank;
  uint32_t world_size;
  uint32_t lanes;
  uint32_t count; /* number of transfers */
  ProxycclControl* control;
  /* [lanes][2][world_size]: for each pair of ranks, first the flow from the lower to the higher rank. */
  ProxycclLink* links;
  uint64_t* pieces; /* [lanes][2][world_size], in device memory: pieces that this rank has sent or received */
  /* Scratch memory, the same on each rank: [lanes][world_size][PROXYCCL_FLOW_SLOTS] slots for data from a rank, and
   * from staging_offset on as many slots for data that the proxy is to send to that rank; absent if all peers are
   * mapped. */
  char* scratch;
  uint64_t slot_bytes, staging_offset;
  ProxycclTransfer transfers[PROXYCCL_MAX_TRANSFERS];
} ProxycclFlows;
