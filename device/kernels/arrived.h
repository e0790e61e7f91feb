/* Data that peers send to a rank for a reduction, piece by piece: a kernel parameter (reduce_arrived.h). Plain C:
 * Python fills it. */
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
  uint32_t chunks;  /* number of chunks of a piece, which blocks take one after another */
  uint64_t chunk;   /* elements of each chunk but the last; a multiple of 16 bytes */
  uint64_t piece;   /* elements of each piece but the last; a multiple of 16 bytes if there are several */
  uint64_t* stages; /* for each piece, the number of complete transfers; in host memory: the proxy writes it, the kernel
                       resets it */
  uint64_t* joined; /* the number of ranks that have joined, also in host memory; null: the stream resets it */
  uint64_t transfers; /* transfers of each piece but the first */
  uint64_t first;     /* transfers of the first piece; 0 if it is complete when the kernel starts */
  uint64_t* gate; /* counts reduced pieces for the proxy, in host memory; null if the proxy does not wait for them */
  uint32_t* chunks_done; /* for each piece, the number of reduced chunks; zero between kernels, like the following */
  uint32_t* here;        /* for each piece, 1 once its transfers are complete, for blocks that do not read `stages` */
  uint32_t* taken;       /* number of chunks that blocks have taken */
  uint32_t* blocks_done; /* number of blocks that have ended */
  uint32_t* opened;      /* the gate is open for this number of pieces, of those before the last one */
  ProxycclControl* control;
} ProxycclArrived;
