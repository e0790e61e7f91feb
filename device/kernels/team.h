/* What the shipped collectives need to know of the ranks: filled by the host, read (and its counters advanced) by
 * kernels.
 *
 * Plain C. Links are a table [blocks][world_size]: each block has its own way to each peer, so blocks never wait for
 * one another inside a collective.
 */
#ifndef PROXYCCL_TEAM_H
#define PROXYCCL_TEAM_H

#include "proxyccl/handles.h"

typedef struct ProxycclLink {
  ProxycclSemaphore semaphore; /* where the peer is mapped */
  ProxycclProxyChannel proxy;  /* where it is reached through the proxy */
  char* remote;                /* the peer's scratch memory, mapped */
  uint32_t proxied;
  uint32_t peer;
} ProxycclLink;

/* Scratch memory, the same on each rank:
 *   2 × exchange_bytes  what peers sent, by parity of `round`
 *   2 × exchange_bytes  what the proxy is to send, likewise (from staging_offset; absent where all peers are mapped)
 */
typedef struct ProxycclTeam {
  uint32_t rank;
  uint32_t world_size;
  ProxycclControl* control;
  ProxycclLink* links;
  char* scratch;
  uint64_t exchange_bytes;
  uint64_t staging_offset;
  /* Advanced by the last block of each kernel, never by the host: a captured graph replays. */
  uint64_t round;
  uint32_t blocks_done;
} ProxycclTeam;

#endif
