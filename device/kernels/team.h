/* What the shipped collectives need to know of the ranks: filled by the host, read (and its counters advanced) by
 * kernels.
 *
 * Plain C. Links are a table [lanes][world_size]. Where every peer is mapped each block has a lane of its own, and
 * blocks never wait for one another inside a collective. Where some are reached through the proxy there is one lane, on
 * which all blocks work together: copy engines and the proxy's thread like few large pieces.
 */
#ifndef PROXYCCL_TEAM_H
#define PROXYCCL_TEAM_H

#include "proxyccl/handles.h"

/* Thread p of a block talks to rank p, so there are no more ranks than a block of these kernels may have threads. That
 * many leave each 128 registers on a GPU. */
enum { PROXYCCL_MAX_BLOCK_THREADS = 512 };

typedef struct ProxycclLink {
  ProxycclSemaphore semaphore; /* where the peer is mapped */
  ProxycclProxyChannel proxy;  /* where it is reached through the proxy */
  char* remote;                /* the peer's scratch memory, mapped */
  uint32_t proxied;
  uint32_t peer; /* its rank in the communicator, which errors name */
} ProxycclLink;

/* Scratch memory, the same on each rank, is this many buffers of exchange_bytes for what peers sent, and as many (from
 * staging_offset; absent where all peers are mapped) for what the proxy is to send.
 */
enum {
  PROXYCCL_ROUND_BUFFERS = 2, /* of the exchange in rounds, by the parity of `round` */
  PROXYCCL_PIPELINE_DEPTH = 3,
  PROXYCCL_EXCHANGE_BUFFERS = PROXYCCL_ROUND_BUFFERS + 2 * PROXYCCL_PIPELINE_DEPTH /* the pipeline has two phases */
};

typedef struct ProxycclTeam {
  uint32_t rank;       /* among the members */
  uint32_t world_size; /* their number */
  uint32_t divisor;    /* what an average divides by: the members, or all for whom each has combined a part */
  ProxycclControl* control;
  ProxycclLink* links;
  char* scratch;
  uint64_t exchange_bytes; /* what a rank takes in from all others at a time */
  uint64_t staging_offset;
  uint64_t shortest_piece; /* bytes below which a pipeline's piece is not worth its signal */
  uint32_t lanes;
  /* Advanced by the last block of each kernel, never by the host: a captured graph replays. */
  uint32_t blocks_done;
  uint64_t round;
  uint32_t grid_barrier[2]; /* a DeviceSyncer's two words */
} ProxycclTeam;

#endif
