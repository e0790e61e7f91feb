/* Data that peers have sent to a rank for a reduction: a kernel parameter (reduce_arrived.h). Plain C: Python fills it.
 */
#ifndef PROXYCCL_ARRIVED_H
#define PROXYCCL_ARRIVED_H

#include "proxyccl/types.h"

typedef struct ProxycclArrived {
  const char* slots;   /* one a peer, in rank order, aligned to 16 bytes */
  uint64_t slot_bytes; /* from one to the next; a multiple of 16 */
  uint32_t rank;
  uint32_t world_size;
  uint32_t divisor; /* of an average */
} ProxycclArrived;

#endif
