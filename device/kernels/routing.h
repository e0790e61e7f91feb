/* Where the rows of MoE dispatch go, and combine fetches them from: filled by the route kernel, read by the others.
 *
 * Plain C. A slot is one expert choice of one token: number token * topk + k. What rank s sends to rank p is a stream
 * of rows, one a slot, ordered by p's expert and then by slot; combine sends the same stream back. A rank's output
 * rows are ordered by its expert, then by the source's rank, then as in the stream. All tables lie in device memory.
 */
#ifndef PROXYCCL_ROUTING_H
#define PROXYCCL_ROUTING_H

#include "proxyccl/types.h"

#define PROXYCCL_NO_SLOT 0xffffffffu

typedef struct ProxycclRouting {
  uint32_t experts_per_rank;
  uint32_t topk;
  uint32_t longest; /* rows of the longest stream between two different ranks, of all in the team */
  /* [world_size][experts + 1]: rows of each rank for each expert, and the rank's first slot with an id that is none
   * (PROXYCCL_NO_SLOT where all are good) */
  uint32_t* counts;
  uint32_t* departures; /* [experts + 1]: in this rank's streams laid end to end, the first row for each expert */
  uint32_t* slots;      /* [max_tokens * topk]: the slot that each row of those streams is for */
  uint32_t* positions;  /* [max_tokens * topk]: the other way round; PROXYCCL_NO_SLOT for a dropped slot */
  uint32_t* arrivals;   /* [experts + 1]: first row from each source for each own expert, streams laid end to end */
  uint32_t* groups;     /* [experts + 1]: first output row of each own expert from each source */
  uint32_t* rows;       /* [world_size * max_tokens * topk]: the output row of each row that arrives */
  uint32_t* tally;      /* [threads][experts]: room for counting */
} ProxycclRouting;

#endif
