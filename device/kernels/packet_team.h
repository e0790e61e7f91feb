/* Parameters of the packet kernels, which describe the ranks and one call. ProxycclPacketTeam is passed by value, so
 * that the epoch is the only number that a block loads from memory before its data.
 *
 * Scratch memory, which all ranks map, has the same layout on each rank:
 *   for each block, for each parity of its epoch, for each slot: `slot_packets` packets
 * There are two slots per peer: slot r holds the packets that rank r sends first in an epoch, slot world_size + r the
 * packets that rank r sends afterwards. A rank's memory has no slots for the rank itself.
 */
#pragma once

#include "proxyccl/control.h"

enum { PROXYCCL_MAX_PACKET_RANKS = 72, PROXYCCL_PACKET_SLOTS_PER_PEER = 2 };

typedef struct ProxycclPacketTeam {
  uint32_t rank;
  uint32_t world_size;
  uint32_t slot_packets;
  /* The host computes how a call is divided, because division is slow on a device. A rank exchanges `share` payloads of
   * packets, or units of lines, with each peer. In each of `call_epochs` epochs, a block sends `epoch_packets` packets
   * (at most slot_packets) to a peer. Packets beyond the share are padding. */
  uint32_t epoch_packets;
  uint32_t call_epochs;
  uint32_t reserved;
  uint64_t share;
  ProxycclControl* control;
  uint32_t* epochs; /* one number per block, in device memory, which only the block advances, so that a captured graph
                     * can be replayed */
  char* memory[PROXYCCL_MAX_PACKET_RANKS]; /* the scratch memory of all ranks, mapped */
} ProxycclPacketTeam;
