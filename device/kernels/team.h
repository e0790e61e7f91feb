/* Parameters of the shipped collectives that describe the ranks.
 *
 * Plain C. Links are a table [lanes][world_size]. Where every peer is mapped, each block has its own lane, and blocks
 * never wait for one another inside a collective. Where some peers are reached through the proxy, there is one lane, on
 * which all blocks work together: copy engines and the proxy's thread are faster with few large pieces.
 */
#pragma once

#include "proxyccl/handles.h"

/* The most threads of a block, which leave each thread 128 registers on a GPU. Also the most ranks: thread p of a block
 * signals rank p and waits for it. */
enum { PROXYCCL_MAX_BLOCK_THREADS = 512 };

typedef struct ProxycclLink {
  ProxycclSemaphore semaphore; /* used if the peer is mapped */
  ProxycclProxyChannel proxy;  /* used if the peer is reached through the proxy */
  char* remote;                /* the peer's scratch memory, mapped */
  uint32_t proxied;
  uint32_t peer; /* the peer's rank in the communicator, which errors give */
} ProxycclLink;

/* Scratch memory, the same on each rank, in this order:
 * - PROXYCCL_ROUND_BUFFERS of exchange_bytes: the peers' data of a round (exchange.h);
 * - PROXYCCL_PIPELINE_BUFFERS of pipeline_bytes: the peers' data of a piece (scattered_reduction.h,
 *   all_reduce_two_shot.h and its twin by proxy);
 * - outputs [lanes][world_size]: where peers' outputs lie (outputs.h);
 * - from staging_offset on, the same buffers for data that the proxy is to send; absent if all peers are mapped.
 * Data of peers that are not mapped uses the same offsets in `proxied`.
 */
enum {
  PROXYCCL_ROUND_BUFFERS = 2, /* by the parity of `round` */
  PROXYCCL_PIPELINE_DEPTH = 3,
  PROXYCCL_PIPELINE_BUFFERS = 2 * PROXYCCL_PIPELINE_DEPTH, /* the pipeline has two phases */
  PROXYCCL_MAX_MAPPED_RANKS = 72 /* greatest number of members in a team whose members are all mapped */
};

/* Counters in device memory. Only the last block of each kernel advances them, so that a captured graph can be
 * replayed. */
typedef struct ProxycclTeamCounters {
  uint64_t round;
  uint32_t blocks_done;
  uint32_t grid_barrier[2]; /* a DeviceSyncer's two words */
} ProxycclTeamCounters;

/* A kernel parameter, passed by value: loading these values from memory would delay the kernel's first send. */
typedef struct ProxycclTeam {
  uint32_t rank;       /* this rank's number among the members */
  uint32_t world_size; /* number of members */
  uint32_t divisor;    /* divisor of an average: the number of members, or of all ranks whose sums the members add */
  uint32_t lanes;
  ProxycclControl* control;
  ProxycclLink* links;
  ProxycclTeamCounters* counters;
  uint32_t* epochs; /* in device memory, one number for each lane, which the lane's block advances: how many kernels
                       used outputs.h */
  char* scratch;
  char* proxied;           /* the scratch memory for peers that are not mapped: `scratch`, or pinned memory
                              of the host, where CPUs move what the proxy would stage */
  uint64_t exchange_bytes; /* bytes from all peers that a buffer for rounds holds */
  uint64_t pipeline_bytes; /* bytes from all peers that a buffer for pipelines holds */
  uint64_t outputs_offset, staging_offset;
  uint64_t one_crossing_bytes; /* most bytes for which the data of an all_reduce by proxy crosses a link only once */
  /* How a call is cut into pieces, computed by the host, because division is slow on a device. In elements: the share
   * that a rank reduces, and the pieces of a share. */
  uint64_t share, piece, pieces;
  uint64_t slot_bytes; /* bytes of a slot for a peer's piece */
  uint32_t meet;   /* whether ranks learn of each other's outputs before they send anything; the same on all ranks */
  uint32_t offers; /* whether peers may load this rank's input where its output lies (all_reduce_two_shot.h) */
  char* remote[PROXYCCL_MAX_MAPPED_RANKS]; /* by rank, the peers' scratch memory; null if it is not mapped */
  /* By rank, the address at which the rank's kernels reach this rank's output, and for this rank the local address; all
   * null if some rank does not reach the output. */
  char* reached_at[PROXYCCL_MAX_MAPPED_RANKS];
} ProxycclTeam;
