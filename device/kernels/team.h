/* The kernel parameter of the shipped collectives that describes the ranks and a call's pieces.
 *
 * A lane is a group of blocks that shares one link to each peer; `links` is a table [lanes][world_size]. If all peers
 * are mapped, each block is a lane, and blocks never wait for one another inside a collective. If some peers are
 * reached through the proxy, all blocks form one lane, because copy engines and the proxy's thread are faster with few
 * large pieces.
 */
#pragma once

#include "proxyccl/handles.h"

/* Maximum number of threads of a block: on a GPU, 512 threads leave each thread 128 registers. The number also limits
 * the ranks of a team, because thread p of a block signals rank p and waits for rank p's signals. */
enum { PROXYCCL_MAX_BLOCK_THREADS = 512 };

typedef struct ProxycclLink {
  ProxycclSemaphore semaphore;
  ProxycclProxyChannel proxy;
  char* remote; /* the peer's scratch memory, mapped */
  uint32_t proxied;
  uint32_t peer; /* the peer's rank in the communicator, for error messages */
} ProxycclLink;

/* Scratch memory has the same layout on each rank, in this order:
 * - PROXYCCL_PIPELINE_DEPTH buffers of data_bytes bytes: the peers' data of a round (exchange.h), or of a piece
 *   (scattered_reduction.h, all_reduce_by_proxy.h);
 * - PROXYCCL_PIPELINE_DEPTH buffers of result_bytes bytes: the peers' results of a piece (all_reduce_two_shot.h,
 *   all_reduce_by_proxy.h);
 * - outputs [lanes][world_size]: packets with the addresses of peers' outputs (outputs.h);
 * - if some peer is not mapped, from staging_offset on: the same buffers for data that the proxy is to send.
 * Data of peers that are not mapped arrives at the same offsets in `proxied`.
 */
enum {
  PROXYCCL_ROUND_BUFFERS = 2, /* the first buffers, indexed by the parity of `round` */
  PROXYCCL_PIPELINE_DEPTH = 3,
  PROXYCCL_MAX_MAPPED_RANKS = 72 /* greatest number of members of a team in which all members map each other's memory */
};

/* Counters in device memory, which the last block of each kernel advances, so that a captured graph can be replayed. */
typedef struct ProxycclTeamCounters {
  uint64_t round;
  uint32_t blocks_done;
  uint32_t grid_barrier[2]; /* a DeviceSyncer's two words */
} ProxycclTeamCounters;

/* A kernel parameter, passed by value, because loading these values from memory would delay the kernel's first send. */
typedef struct ProxycclTeam {
  uint32_t rank;       /* this rank's number among the members */
  uint32_t world_size; /* number of members */
  uint32_t divisor;    /* divisor of an average: the number of ranks whose values or partial sums the members add */
  uint32_t lanes;
  ProxycclControl* control;
  ProxycclLink* links;
  ProxycclTeamCounters* counters;
  uint32_t* epochs; /* in device memory: for each lane, the number of kernels that used outputs.h; the lane's block
                       advances this number */
  char* scratch;
  char* proxied; /* scratch memory for peers that are not mapped: `scratch`, or pinned host memory if CPUs move
                    the staged data */
  uint64_t data_bytes, result_bytes; /* bytes of a buffer, for all peers together */
  uint64_t outputs_offset, staging_offset;
  uint64_t one_crossing_bytes; /* an all_reduce of at most this many bytes sends whole arrays (all_reduce_by_proxy.h) */
  /* The host computes how a call is cut into pieces, because division is slow on a device. `share` is the number of
   * elements that a rank reduces, `piece` the number of elements in a piece of a share, `pieces` their number. */
  uint64_t share, piece, pieces;
  uint64_t slot_bytes; /* bytes of a slot for a peer's piece */
  uint32_t meet;       /* not 0 if ranks first exchange the addresses of their outputs; equal on all ranks */
  uint32_t offers;     /* not 0 if peers may load this rank's input, at its output's address (all_reduce_two_shot.h) */
  char* remote[PROXYCCL_MAX_MAPPED_RANKS]; /* indexed by rank: the peers' scratch memory; null if it is not mapped */
  /* Indexed by rank: the address at which that rank's kernels map this rank's output. All addresses are null if some
   * rank does not map the output. */
  char* reached_at[PROXYCCL_MAX_MAPPED_RANKS];
} ProxycclTeam;
