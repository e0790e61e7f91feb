/* Data that peers send to a rank for a reduction, piece by piece: a kernel parameter (reduce_arrived.h). Plain C:
 * Python fills it. */
#ifndef PROXYCCL_ARRIVED_H
#define PROXYCCL_ARRIVED_H

#include "proxyccl/control.h"
#include "proxyccl/types.h"

typedef struct ProxycclArrived {
  const char* slots;   /* one a peer, in rank order, aligned to 16 bytes */
  uint64_t slot_bytes; /* from one to the next; a multiple of 16 */
  uint32_t rank;
  uint32_t world_size;
  uint32_t divisor; /* of an average */
  uint32_t pieces;
  uint32_t chunks;       /* of a piece: blocks take one after another */
  uint64_t chunk;        /* elements of each but the last; a multiple of 16 bytes */
  uint64_t piece;        /* elements of each piece but the last; a multiple of 16 bytes if there are several */
  uint64_t* stages;      /* by piece, how many of its transfers are complete; host memory that the proxy writes, and the
                            kernel resets */
  uint64_t* joined;      /* the same of the ranks that have joined, which are all; null: the stream resets it */
  uint64_t transfers;    /* of each piece but the first */
  uint64_t first;        /* of the first; 0: it is complete when the kernel starts */
  uint64_t* gate;        /* counts reduced pieces for the proxy, in host memory; null: nobody waits for it */
  uint32_t* chunks_done; /* by piece, zero between kernels: chunks that are reduced, … */
  uint32_t* here;        /* … and 1 once its transfers are complete, for blocks that do not read `stages` */
  uint32_t* taken;       /* zero between kernels: chunks that blocks have taken, … */
  uint32_t* blocks_done; /* … blocks that have ended, … */
  uint32_t* opened;      /* … and pieces before the last for which the gate is open */
  ProxycclControl* control;
} ProxycclArrived;

#endif
