/* The parameter of reduce_arrived.h's kernel: the data that peers send piece by piece and that a rank reduces. */
#pragma once

#include "proxyccl/control.h"
#include "proxyccl/types.h"

typedef struct ProxycclArrived {
  const char* slots;   /* one slot for each peer, in rank order, aligned to 16 bytes */
  uint64_t slot_bytes; /* bytes from one slot to the next; a multiple of 16 */
  uint32_t rank;
  uint32_t world_size;
  uint32_t divisor; /* divisor of an average */
  uint32_t pieces;
  uint32_t chunks;  /* number of chunks of a piece; an idle block takes the next chunk */
  uint64_t chunk;   /* elements of each chunk but the last; together a multiple of 16 bytes */
  uint64_t piece;   /* elements of each piece but the last; together a multiple of 16 bytes */
  uint64_t* stages; /* in host memory: for each piece, the number of complete transfers, which the proxy writes and the
                       kernel resets */
  uint64_t* joined; /* in host memory: number of ranks that have joined the call; the kernel resets it; null if the
                       stream resets it */
  uint64_t transfers; /* number of transfers of each piece but the first */
  uint64_t first;     /* number of transfers of the first piece; 0 if the piece is complete when the kernel starts */
  uint64_t* gate; /* in host memory: number of reduced pieces, for the proxy; null if the proxy does not wait for it */
  uint32_t* chunks_done; /* for each piece, the number of reduced chunks; this and later counters are zero between
                          * kernels */
  uint32_t* here;        /* for each piece, 1 once its transfers are complete, so that only one block polls `stages` */
  uint32_t* taken;       /* number of chunks that blocks have taken */
  uint32_t* blocks_done;
  uint32_t* opened; /* number of reduced pieces, like `gate`; the last piece is not counted */
  ProxycclControl* control;
} ProxycclArrived;
