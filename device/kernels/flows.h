/* Parameters of the kernel in send_receive.h, which describe the ranks and one call.
 *
 * A *flow* is the connection from one rank to another. A flow has `lanes` lanes, each with a link and a ring of slots
 * in the receiver's scratch memory. The receiver's signals on the link count credits, which are slots that it has read.
 * So a flow involves only its two ranks, and flows never wait for one another.
 *
 * A slot has, in this order: a header, whose first word describes the slot's piece (send_receive.h); memory for lines,
 * which holds nothing else, because other data could equal a line's flag; memory for pieces that are not sent in lines.
 */
#pragma once

#include "team.h"

enum {
  PROXYCCL_FLOW_HEADER_BYTES = 128,
  PROXYCCL_MAX_TRANSFERS = 64 /* maximum number of transfers of a launch, because all its blocks must be resident */
};

/* One transfer of a launch: to a peer, from a peer, or, if `peer` is the rank itself, from `src` to `dst`. */
typedef struct ProxycclTransfer {
  const char* src; /* null if the transfer receives */
  char* dst;       /* null if the transfer sends */
  uint64_t bytes;
  uint64_t lane_bytes; /* bytes of each lane; the last may have fewer */
  uint32_t peer;
  uint32_t lanes; /* number of blocks that work on the transfer, equal on the sender and the receiver */
} ProxycclTransfer;

typedef struct ProxycclFlows {
  uint32_t rank;
  uint32_t world_size;
  uint32_t lanes;
  uint32_t slots; /* slots of a lane, so at most this many pieces are sent and not yet read */
  uint32_t count; /* number of transfers */
  ProxycclControl* control;
  /* [lanes][2][world_size]: index 0 of the second dimension is the flow from the lower to the higher rank. */
  ProxycclLink* links;
  uint64_t* pieces; /* [lanes][2][world_size], in device memory: number of pieces sent or received */
  /* Scratch memory, with the same layout on each rank: [lanes][world_size][slots] slots for data from each
   * rank. If some peer is not mapped, the same number of slots from staging_offset on hold the data that the proxy
   * sends to each rank. */
  char* scratch;
  uint64_t slot_bytes, staging_offset;
  uint64_t line_bytes;  /* maximum number of bytes of a lane that are sent in lines; 0 if the links don't carry lines */
  uint64_t data_offset; /* offset, in a slot, of the data of pieces that are not sent in lines */
  ProxycclTransfer transfers[PROXYCCL_MAX_TRANSFERS];
} ProxycclFlows;
