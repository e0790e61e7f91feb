/* Parameters of the packet kernels: the ranks, and one call. It is a kernel parameter, passed by value, so a
 * kernel's only load before its data is that of its block's epoch.
 *
 * Plain C. Scratch memory, the same on each rank and mapped by every other:
 *   for each block, for each parity of its epoch, for each slot: `slot_packets` packets
 * There are two slots per rank. Each algorithm decides what they hold.
 */
#pragma once

#include "proxyccl/control.h"

enum { PROXYCCL_MAX_PACKET_RANKS = 72, PROXYCCL_PACKET_SLOTS_PER_RANK = 2 };

typedef struct ProxycclPacketTeam {
  uint32_t rank;
  uint32_t world_size;
  uint32_t slot_packets;
  /* The call's shape, computed by the host, because division is slow on a device. A rank exchanges `share` payloads of
   * packets, or units of lines, with each peer. A block moves `epoch_packets` of them (at most slot_packets) in each of
   * `call_epochs` epochs. The blocks may move more packets than the data needs: the last packets are padding. */
  uint32_t epoch_packets;
  uint32_t call_epochs;
  uint32_t reserved;
  uint64_t share;
  ProxycclControl* control;
  uint32_t* epochs; /* one per block, in device memory; only the block advances it, so a graph can be replayed */
  char* scratch;
  char* remote[PROXYCCL_MAX_PACKET_RANKS]; /* the peers' scratch, mapped */
} ProxycclPacketTeam;
